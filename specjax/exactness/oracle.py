"""The exact joint law of the first tokens, by enumeration: what every sample is compared with.

All continuations of a prompt go through the target in one plain batch (no draft, no rollback) and
`specjax.sampling.log_probs` makes the laws, as in decoding. Products are taken in float64.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import sampling
from specjax.types import Model, Params, Sampling

MAX_CELLS = 4096


class NotEnumerableError(ValueError):
    """The joint law has too many cells; the message says which test to use instead."""


@dataclass(frozen=True)
class Joint:
    """Exact laws of `length` tokens over `vocab` ids.

    `steps[t]` holds, for each of the `vocab ** t` prefixes, the law of the token that follows.
    """

    vocab: int
    length: int
    steps: tuple[np.ndarray, ...]

    @property
    def cells(self) -> np.ndarray:
        """Probability of each continuation; the first token is the most significant digit."""
        product = np.ones(1)
        for step in self.steps:
            product = (product[:, None] * step).reshape(-1)
        return product

    def stopped(self, end_id: int) -> Joint:
        """The law of continuations that end with `end_id` and are filled up with it."""
        steps = []
        for depth, step in enumerate(self.steps):
            over = [end_id in self.tokens(context, depth) for context in range(len(step))]
            steps.append(np.where(np.array(over)[:, None], np.arange(self.vocab) == end_id, step))
        return Joint(self.vocab, self.length, tuple(steps))

    def seen(self, counts: np.ndarray) -> list[np.ndarray]:
        """Counts of each token after each prefix, position by position, from those of whole continuations."""
        return [counts.reshape(len(step), self.vocab, -1).sum(-1) for step in self.steps]

    def tokens(self, prefix: int, length: int) -> tuple[int, ...]:
        """The tokens of a prefix, from its number."""
        return tuple(int(i) for i in np.unravel_index(prefix, (self.vocab,) * length)) if length else ()


def check_enumerable(vocab: int, length: int) -> None:
    """Refuse laws with more cells than can be tested."""
    if vocab**length > MAX_CELLS:
        raise NotEnumerableError(
            f"{length} tokens of a vocabulary of {vocab} have {vocab**length:,} cells, more than {MAX_CELLS:,}: "
            "test fewer tokens, or use specjax.exactness.check_large (probability-integral transform and "
            "two-sample test), which needs no enumeration"
        )


def enumerate_joint(
    model: Model, params: Params, prompt: Sequence[int], sampler: Sampling, length: int, vocab: int | None = None
) -> Joint:
    """The joint law of `length` tokens after `prompt`.

    Args:
      sampler: of one row.
      vocab: ids that are counted (the first ones); by default all.
    """
    vocab = vocab or model.vocab_size
    check_enumerable(vocab, length)
    prefixes = np.array(list(itertools.product(range(vocab), repeat=length - 1)), np.int32).reshape(-1, length - 1)
    tokens = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(prefixes), 1)), prefixes], 1)
    wide = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], tokens.shape[:1]), sampler)
    window = jnp.broadcast_to(jnp.arange(len(prompt), len(prompt) + length, dtype=jnp.int32), (len(tokens), length))
    found = np.asarray(laws_at(model, params, jnp.asarray(tokens), window, wide), np.float64)
    laws = (found / found.sum(-1, keepdims=True))[..., :vocab]
    return Joint(vocab, length, tuple(laws[:: vocab ** (length - 1 - t), t] for t in range(length)))


@functools.partial(jax.jit, static_argnames=("model",))
def laws_at(
    model: Model, params: Params, tokens: Int[Array, "B T"], window: Int[Array, "B N"], filters: Sampling
) -> Float[Array, "B N V"]:
    """The target's laws of the tokens at `window`, from one pass over finished texts: no draft, no rollback."""
    cache = model.init_cache(tokens.shape[0], tokens.shape[1], jnp.float32)
    hidden = model.forward(params, tokens, cache, jnp.zeros(tokens.shape[:1], jnp.int32)).hidden
    logits = model.logits(params, jnp.take_along_axis(hidden, window[..., None] - 1, 1))[..., : model.vocab_size]
    return jnp.exp(sampling.log_probs(logits, filters))
