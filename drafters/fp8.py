"""FP8: the target with e4m3 weights drafts for the target in full precision.

One scale an output channel (absmax / 448), weights clipped before the cast, which would turn anything
above 464 into NaN; embedding, norms and head stay as they are and are the target's own. With
`kv="shared"` drafts are made on the target's cache, which adds no KV at all; with `kv="own"` the drafter
keeps one of its own, as a deployment on another device would.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from specjax import decode
from specjax.drafter import Drafter, draft_chain
from specjax.model import Llama
from specjax.model.decoder import FP8
from specjax.types import Draft, Keys, Model, Params, Target


@dataclass(frozen=True)
class Fp8(Drafter):
    """the target with e4m3 weights, on the target's cache (kv=shared) or its own (kv=own)"""

    num_speculative_tokens: int = 4
    kv: str = "shared"

    KV: ClassVar[tuple[str, ...]] = ("shared", "own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv not in self.KV:
            raise ValueError(f"kv={self.kv!r}: must be one of {', '.join(self.KV)}")

    def model(self, target: Model) -> Llama:
        """The target's decoder with quantised linear layers."""
        assert isinstance(target, Llama)
        return Llama(dataclasses.replace(target.config, quantized=True))

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """Quantised linear layers; everything else is the target's and counts zero here."""
        return {"layers": jax.tree.map(_quantize, target_params["layers"], is_leaf=_is_linear)}

    def init(self, params: Params, target: Target) -> PyTree[Array]:
        """Nothing when the cache is shared, else a cache filled with the prompt."""
        if self.kv == "shared":
            return ()
        model = self.model(target.model)
        batch, slots = target.tokens.shape
        cache = model.init_cache(batch, slots, target.cache[0][0].dtype)
        return decode.prefill(model, self.whole(params, target), target.tokens, target.length - 1, cache)[2]

    def whole(self, params: Params, target: Target) -> Params:
        """Own layers between the target's embedding, norm and head."""
        layers = {
            index: {name: params["layers"][index].get(name, part) for name, part in layer.items()}
            for index, layer in target.params["layers"].items()
        }
        return target.params | {"layers": layers}

    def propose(self, keys: Keys, params: Params, state: Any, target: Target) -> Draft:
        """Draft a chain with the quantised layers."""
        shared = self.kv == "shared"
        tokens, log_q, cache = draft_chain(
            keys, target, self.num_speculative_tokens, self.model(target.model), self.whole(params, target),
            target.cache if shared else state, reread=1 if shared else 2,
        )  # fmt: skip
        count = jnp.full(target.length.shape, self.num_speculative_tokens, jnp.int32)
        return Draft(tokens, log_q, count, cache if shared else target.cache, () if shared else cache)


def _is_linear(node: Any) -> bool:
    return isinstance(node, dict) and "weight" in node and getattr(node["weight"], "ndim", 0) == 2


def _quantize(linear: Any) -> Any:
    if not _is_linear(linear):
        return linear
    quantized, scale = quantize(linear["weight"])
    return {**linear, "weight": quantized, "scale": scale}


def quantize(weight: Float[Array, "O I"]) -> tuple[Float[Array, "O I"], Float[Array, "O"]]:
    """E4m3 values and one float32 scale an output channel; a channel of zeros gets scale 1."""
    largest = float(jnp.finfo(FP8).max)
    weight = weight.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(weight), 1)
    scale = jnp.where(absmax > 0, jnp.maximum(absmax, 1e-30) / largest, 1)
    return jnp.clip(weight / scale[:, None], -largest, largest).astype(FP8), scale
