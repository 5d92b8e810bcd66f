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

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from specjax import cache
from specjax.drafter import Drafter, chain_log_probs, draft_chain, read_prompt, window_log_probs
from specjax.model import Llama
from specjax.model.decoder import FP8
from specjax.types import Draft, Keys, Model, Params, Seen, Target, Text


@dataclass(frozen=True)
class Fp8(Drafter):
    """the target with e4m3 weights, on the target's cache (kv=shared) or its own (kv=own)"""

    num_speculative_tokens: int = 4
    kv: str = "shared"
    checkpoint: str = ""

    untrained: ClassVar[str] = ""  # the target itself, rounded
    KV: ClassVar[tuple[str, ...]] = ("shared", "own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv not in self.KV:
            raise ValueError(f"kv={self.kv!r}: must be one of {', '.join(self.KV)}")

    def model(self, target: Model) -> Llama:
        """The target's decoder with quantised linear layers."""
        assert isinstance(target, Llama)
        return Llama(dataclasses.replace(target.config, quantized=True))

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """Quantised linear layers; everything else is the target's and counts zero here."""
        return {"layers": _quantize_all(target_params["layers"])}

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        """Nothing when the cache is shared, else one of its own."""
        return () if self.kv == "shared" else model.init_cache(batch, capacity, dtype)

    def observe(self, params: Params, state: Any, seen: Seen) -> PyTree[Array]:
        """A cache of its own reads the prompt."""
        if self.kv == "shared":
            return state
        target = seen.target
        return read_prompt(self.model(target.model), lay_over(target.params, params), state, seen)

    def scratch(self, state: PyTree[Array], length: Int[Array, "B"]) -> PyTree[Bool[Array, "..."]]:
        """The last two tokens are read again."""
        return cache.scratch(state, length - 2)

    def propose(self, keys: Keys, params: Params, state: Any, target: Target) -> Draft:
        """Draft a chain with the quantised layers."""
        shared = self.kv == "shared"
        tokens, log_q, filled = draft_chain(
            keys, target, self.num_speculative_tokens, self.model(target.model), lay_over(target.params, params),
            target.cache if shared else state, reread=1 if shared else 2,
        )  # fmt: skip
        return Draft(tokens, log_q, filled if shared else target.cache, () if shared else filled)

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"]:
        """One pass of the quantised layers, or a window a draft where the text before it is in the target's cache."""
        one_pass = window_log_probs if self.kv == "shared" else chain_log_probs
        return one_pass(text, self.num_speculative_tokens, self.model(text.model), lay_over(text.params, params))


def _quantize_all(tree: Params) -> Params:
    """Weights and scales of the linear layers below `tree`; norms and biases stay the target's."""
    if getattr(tree.get("weight"), "ndim", 0) == 2:
        weight = tree["weight"]
        if "scale" in tree:  # the target is quantised itself
            weight = weight.astype(jnp.float32) * tree["scale"][:, None]
        weight, scale = quantize(weight)
        return {"weight": weight, "scale": scale}
    parts = {name: _quantize_all(part) for name, part in tree.items() if isinstance(part, dict)}
    return {name: part for name, part in parts.items() if part}


def lay_over(base: Params, own: Params) -> Params:
    """Own linear weights and their scales, in the places of the target's."""
    return base | {name: lay_over(base[name], part) if isinstance(part, dict) else part for name, part in own.items()}


def quantize(weight: Float[Array, "O I"]) -> tuple[Float[Array, "O I"], Float[Array, "O"]]:
    """E4m3 values and one float32 scale an output channel; a channel of zeros gets scale 1."""
    largest = float(jnp.finfo(FP8).max)
    weight = weight.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(weight), 1)
    scale = jnp.where(absmax > 0, jnp.maximum(absmax, 1e-30) / largest, 1)
    return jnp.clip(weight / scale[:, None], -largest, largest).astype(FP8), scale
