"""Small subjects with known answers: table targets, and drafters that are right, wrong, silent or hostile.

They ship with the package, so that a researcher's own tests can use them.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from specjax import cache as kv
from specjax.drafter import Drafter, draft_chain
from specjax.model import Llama, ModelConfig
from specjax.types import Cache, Draft, Forward, Keys, Model, Params, Target


def tiny_config(**changes: Any) -> ModelConfig:
    """A decoder small enough for a test and complete enough to have grouped-query attention."""
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "context_length": 256, "tied_embeddings": True,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


def tiny_model(seed: int = 0, sharpness: float = 3.0, **changes: Any) -> tuple[Llama, Params]:
    """A random decoder and its weights; matrices are scaled so that its laws are neither flat nor certain."""
    model = Llama(tiny_config(**changes))
    params = model.init(jax.random.key(seed))
    return model, jax.tree.map(lambda leaf: leaf * sharpness if leaf.ndim == 2 else leaf, params)


@dataclass(frozen=True)
class TableModel:
    """A target whose law is a table on the last `order` tokens, read through the cache as a decoder would.

    Its cache holds token ids, so that a stale or misplaced slot changes the law. `params` is the table
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

    def init_cache(self, batch: int, slots: int, dtype: Any) -> Cache:
        """One slot a token, one wide."""
        return kv.init_cache(1, batch, 1, slots, 1, dtype)

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B S"],
        cache: Cache,
        start: Int[Array, "B"],
        *,
        depth: Int[Array, "S"] | Int[Array, "B S"] | None = None,
        mask: Bool[Array, "S S"] | Bool[Array, "B S S"] | None = None,
        num_layers: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> Forward:
        """`hidden` is the context of each query: the last `order` token ids that it sees."""
        batch, queries = tokens.shape
        rows = tokens.astype(cache[0][0].dtype)[:, None, :, None]
        ids = kv.write(cache[0][0], rows, start)
        if mask is None:  # a chain: query i sees every slot up to its own
            last = start[:, None, None] + jnp.arange(queries, dtype=jnp.int32)[None, :, None]
            last = last + jnp.arange(1 - self.order, 1, dtype=jnp.int32)[None, None]
            last = jnp.minimum(last, ids.shape[2] - 1)
        else:
            last = self._last_seen(ids, start, jnp.broadcast_to(mask, (batch, queries, queries)))
        flat = jnp.take_along_axis(ids[:, 0, :, 0], jnp.maximum(last, 0).reshape(batch, -1), 1)
        context = jnp.where(last >= 0, flat.reshape(last.shape), self.size).astype(jnp.float32)
        return Forward(context, tuple(context for _ in taps), ((ids, cache[0][1]),))

    def _last_seen(
        self, ids: Float[Array, "B 1 T 1"], start: Int[Array, "B"], mask: Bool[Array, "B S S"]
    ) -> Int[Array, "B S O"]:
        queries, slots = mask.shape[1], ids.shape[2]
        slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
        offset = slot - start[:, None, None]
        index = jnp.broadcast_to(jnp.clip(offset, 0, queries - 1), (mask.shape[0], queries, slots))
        inside = (offset >= 0) & (offset < queries)
        seen = (offset < 0) | (inside & jnp.take_along_axis(mask, index, 2))
        return jax.lax.top_k(jnp.where(seen, slot, -1), self.order)[0][..., ::-1]

    def logits(self, params: Params, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """The table's row for each context."""
        context = jnp.clip(hidden.astype(jnp.int32), 0, self.size)
        return params["table"][tuple(context[..., i] for i in range(self.order))]


def table_params(laws: np.ndarray) -> Params:
    """Logits of a table of probabilities; zeros become -inf."""
    with np.errstate(divide="ignore"):
        return {"table": jnp.asarray(np.log(laws), jnp.float32)}


@dataclass(frozen=True)
class Self(Drafter):
    """The target drafts for itself, with a cache of its own: every draft must be accepted."""

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """A copy of the target's weights."""
        return jax.tree.map(jnp.copy, target_params)

    def init(self, params: Params, target: Target) -> PyTree[Array]:
        """A copy of the target's cache as the prompt left it."""
        return jax.tree.map(jnp.copy, target.cache)

    def propose(self, keys: Keys, params: Params, state: Any, target: Target) -> Draft:
        """A chain drawn from the target's own law."""
        tokens, log_q, cache = draft_chain(
            keys, target, self.num_speculative_tokens, target.model, params, state, reread=2
        )
        return Draft(tokens, log_q, _full(target, self.num_speculative_tokens), target.cache, cache)


@dataclass(frozen=True)
class Oracle(Drafter):
    """Point masses on a known continuation, wrong from position `accept[b]` on in row b.

    `params` is `{"tokens": [B, T], "accept": [B]}`: a row's whole greedy text, and how many drafts of
    each round are right.
    """

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """The known continuation, spoilt at one position."""
        steps = jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None]
        index = jnp.minimum(target.length[:, None] + steps, params["tokens"].shape[1] - 1)
        right = jnp.take_along_axis(params["tokens"], index, 1)
        wrong = (right + 1) % target.model.vocab_size
        tokens = jnp.where(steps == params["accept"][:, None], wrong, right)
        return Draft(tokens, None, _full(target, self.num_speculative_tokens), target.cache, state)


@dataclass(frozen=True)
class Hostile(Drafter):
    """Always the full count: ids out of range, an end id and arbitrary tokens, whatever the budget."""

    end_id: int = 0

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Tokens that turn with the length, so that every kind stands at every position."""
        vocab = target.model.vocab_size
        menu = jnp.asarray([self.end_id, 1, vocab, 2, -1, 3, 2**31 - 1], jnp.int32)
        steps = jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None]
        tokens = menu[(target.length[:, None] * 3 + steps) % menu.shape[0]]
        return Draft(tokens, None, _full(target, self.num_speculative_tokens), target.cache, state)


@dataclass(frozen=True)
class Silent(Drafter):
    """Proposes nothing, though it could."""

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Zeros that don't count."""
        tokens = jnp.zeros((target.length.shape[0], self.num_speculative_tokens), jnp.int32)
        return Draft(tokens, None, _full(target, 0), target.cache, state)


@dataclass(frozen=True)
class Poison(Drafter):
    """Runs another drafter after filling everything stale with garbage: nothing may change."""

    inner: Drafter = dataclasses.field(default_factory=Silent)

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The inner drafter's."""
        return self.inner.params(key, model, target_params)

    def init(self, params: Params, target: Target) -> PyTree[Array]:
        """The inner drafter's."""
        return self.inner.init(params, target)

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """The inner drafter's proposal, given garbage beyond the committed text."""
        slots = target.tokens.shape[1]
        slot = jnp.arange(slots, dtype=jnp.int32)[None]
        stale = (slot >= target.length[:, None] - 1)[:, None, :, None]
        cache = jax.tree.map(lambda leaf: jnp.where(stale, jnp.asarray(1e4, leaf.dtype), leaf), target.cache)
        tokens = jnp.where(slot < target.length[:, None], target.tokens, 7)
        return self.inner.propose(keys, params, state, dataclasses.replace(target, cache=cache, tokens=tokens))


@dataclass(frozen=True)
class Tree(Drafter):
    """Independent uniform draws on a fixed tree: siblings with replacement, each from the same law."""

    num_speculative_tokens: int = 0
    parents: tuple[int, ...] = (-1, -1, 0, 0, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_speculative_tokens", len(self.parents))

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Tokens uniform over the vocabulary."""
        vocab, nodes = target.model.vocab_size, len(self.parents)
        draw = functools.partial(jax.random.randint, shape=(nodes,), minval=0, maxval=vocab, dtype=jnp.int32)
        log_q = jnp.full((target.length.shape[0], nodes, vocab), -np.log(vocab), jnp.float32)
        parents = jnp.asarray(self.parents, jnp.int32)
        return Draft(jax.vmap(draw)(keys), log_q, _full(target, nodes), target.cache, state, parents)


def _full(target: Target, count: int) -> Int[Array, "B"]:
    return jnp.full(target.length.shape, count, jnp.int32)
