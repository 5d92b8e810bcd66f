"""Targets with known answers: tiny decoders, and tables whose probabilities are plain to see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax.model import Llama, ModelConfig
from specjax.model.positions import visible_slots, whole_text
from specjax.types import Cache, Forward, Params


def tiny_config(**changes: Any) -> ModelConfig:
    """A decoder small enough for a test and complete enough to have grouped-query attention."""
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "context_length": 256, "tied_embeddings": True,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


def tiny_model(seed: int = 0, sharpness: float = 3.0, **changes: Any) -> tuple[Llama, Params]:
    """A random decoder and its weights; matrices are scaled so that its probabilities are neither flat nor certain."""
    model = Llama(tiny_config(**changes))
    params = model.init(jax.random.key(seed))
    return model, jax.tree.map(lambda leaf: leaf * sharpness if leaf.ndim == 2 else leaf, params)


@dataclass(frozen=True)
class TableModel:
    """A target whose probabilities are a table on the last `order` tokens, read through the cache as a decoder would.

    Its cache holds token ids, so that a stale or misplaced slot changes them. `params` is the table
    of logits, `[V + 1] * order + [V]`; the extra index V stands for "before the text".
    """

    size: int
    order: int = 2
    context_length: int = 256

    @property
    def vocab_size(self) -> int:
        """Ids of the table."""
        return self.size

    @property
    def num_layers(self) -> int:
        """One cache layer."""
        return 1

    @property
    def hidden_size(self) -> int:
        """A hidden state is the context: the last `order` ids."""
        return self.order

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> Cache:
        """One slot a token, one wide."""
        return kv.init_cache(1, batch, 1, capacity, 1, dtype)

    def embed(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """The id itself, at the place of the last token of a context."""
        return jnp.pad(tokens.astype(jnp.float32)[..., None], ((0, 0), (0, 0), (self.order - 1, 0)))

    def forward(
        self,
        params: Params,
        inputs: Int[Array, "B S"] | Float[Array, "B S D"],
        cache: Cache | None,
        start: Int[Array, "B"],
        *,
        positions: Int[Array, "B M"] | None = None,
        mask: Bool[Array, "S M"] | Bool[Array, "B S M"] | None = None,
        layers: tuple[int, int] | None = None,
        taps: tuple[int, ...] = (),
        documents: Int[Array, "B S"] | None = None,
    ) -> Forward:
        """`hidden` is the context of each query: the last `order` token ids that it sees."""
        ids = inputs if jnp.issubdtype(inputs.dtype, jnp.integer) else inputs[..., -1]
        first, slots = jnp.zeros_like(start), ids.astype(jnp.float32)
        if cache is not None:
            [(written, unused)] = cache.layers
            written = kv.write(written, ids.astype(written.dtype)[:, None, :, None], start)
            cache, first, slots = Cache(((written, unused),)), start, written[:, 0, :, 0]
        steps = jnp.arange(ids.shape[1], dtype=start.dtype)[None]
        if mask is None and documents is None:  # a chain: query i sees every slot up to its own
            last = (first[:, None] + steps)[..., None] + jnp.arange(1 - self.order, 1, dtype=start.dtype)[None, None]
            last = jnp.minimum(last, slots.shape[1] - 1)
        elif cache is None:
            last = self._last_seen(whole_text(start, ids.shape[1], documents, None)[1])
        else:
            at = start[:, None] + steps if positions is None else positions
            last = self._last_seen(visible_slots(cache.capacity, start, ids.shape[1], at, mask, None))
        found = jnp.take_along_axis(slots, jnp.maximum(last, 0).reshape(len(slots), -1), 1).reshape(last.shape)
        context = jnp.where(last >= 0, found, self.size).astype(jnp.float32)
        return Forward(context, tuple(context for _ in taps), cache or Cache(()))

    def _last_seen(self, visible: Bool[Array, "B S T"]) -> Int[Array, "B S O"]:
        """The last `order` slots that each query sees; -1 where there are fewer."""
        numbered = jnp.where(visible, jnp.arange(visible.shape[2], dtype=jnp.int32)[None, None], -1)
        padded = jnp.pad(numbered, ((0, 0), (0, 0), (self.order, 0)), constant_values=-1)
        return jax.lax.top_k(padded, self.order)[0][..., ::-1]

    def logits(self, params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """The table's row for each context."""
        context = jnp.clip(hidden.astype(jnp.int32), 0, self.size)
        return params["table"][tuple(context[..., i] for i in range(self.order))]


def table_params(probs: np.ndarray) -> Params:
    """Logits of a table of probabilities; zeros become -inf."""
    with np.errstate(divide="ignore"):
        return {"table": jnp.asarray(np.log(probs), jnp.float32)}
