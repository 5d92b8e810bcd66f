"""Drafters that are right, wrong, silent or hostile."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from specjax import cache as kv
from specjax.drafter import Drafter, Wrapper, chain_log_probs, draft_chain, read_prompt
from specjax.testing.differences import fill_garbage
from specjax.types import Draft, Keys, Model, Params, Seen, Target, Text


@dataclass(frozen=True)
class Self(Drafter):
    """The target drafts for itself, with a cache of its own: every draft must be accepted."""

    untrained: ClassVar[str] = ""

    def init_params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """A copy of the target's weights."""
        return jax.tree.map(jnp.copy, target_params)

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        """A cache of its own."""
        return model.init_cache(batch, capacity, dtype)

    def observe(self, params: Params, state: Any, seen: Seen) -> PyTree[Array]:
        """Read the prompt as the target does."""
        return read_prompt(seen.target.model, params, state, seen)

    def scratch(self, state: PyTree[Array], length: Int[Array, "B"]) -> PyTree[Bool[Array, "..."]]:
        """The last two tokens are read again."""
        return kv.scratch(state, length - 2)

    def propose(self, keys: Keys, params: Params, state: Any, target: Target) -> Draft:
        """A chain drawn from the target's own probabilities."""
        tokens, log_q, cache = draft_chain(
            keys, target, self.num_speculative_tokens, target.model, params, state, reread=2
        )
        return Draft(tokens, log_q, target.cache, cache)

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"]:
        """One pass."""
        return chain_log_probs(text, self.num_speculative_tokens, text.model, params)


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
        return Draft(tokens, None, target.cache, state)


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
        return Draft(tokens, None, target.cache, state)


@dataclass(frozen=True)
class Silent(Drafter):
    """Proposes nothing, though it could."""

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Zeros that don't count."""
        tokens = jnp.zeros((target.length.shape[0], self.num_speculative_tokens), jnp.int32)
        return Draft(tokens, None, target.cache, state, jnp.zeros_like(target.length))


@dataclass(frozen=True)
class Poison(Wrapper):
    """Runs another drafter after filling everything stale with garbage: nothing may change."""

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """The inner drafter's proposal, given garbage beyond the committed text."""
        cache = fill_garbage(target.cache, kv.scratch(target.cache, target.length - 1))
        slot = jnp.arange(target.tokens.shape[1], dtype=jnp.int32)[None]
        tokens = jnp.where(slot < target.length[:, None], target.tokens, 7)
        return self.inner.propose(keys, params, state, dataclasses.replace(target, cache=cache, tokens=tokens))


@dataclass(frozen=True)
class Tree(Drafter):
    """Independent uniform draws on a fixed tree: siblings with replacement, each from the same probabilities."""

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
        return Draft(jax.vmap(draw)(keys), log_q, target.cache, state, parents=parents)
