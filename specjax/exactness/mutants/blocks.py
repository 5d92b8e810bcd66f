"""Block verification with one step changed: a control that equals it, and faults that have been shipped.

Hierarchical verification (arXiv 2601.05724) with its prefix ratio capped, as specified, stops with the same
probabilities at the same places; with the last ratio left uncapped it changes the law.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from specjax.verify import Block
from specjax.verify.walk import normalise


@dataclass(frozen=True)
class Hierarchical(Block):
    """Hierarchical verification as specified: the ratio of the two divergences of the weighted law."""

    def loss(self, gain: Array, weight: Array, weighted: Array, q: Array) -> Array:
        return jnp.maximum(q - weighted, 0).sum(-1)


@dataclass(frozen=True)
class BlockWithBreak(Block):
    def longest(self, success: Array) -> Array:
        return jnp.cumprod(success, -1).sum(-1, dtype=jnp.int32)


@dataclass(frozen=True)
class BlockTokenResidual(Block):
    def residual(self, weight: Array, p: Array, q: Array) -> Array:
        return normalise(jnp.maximum(p - q, 0), p)


@dataclass(frozen=True)
class LastRatioUncapped(Block):
    def last(self, weight: Array, p: Array, q: Array) -> Array:
        before = jnp.cumprod(p / q, -1)[:, :-1]
        return jnp.pad(before, ((0, 0), (1, 0)), constant_values=1) * p
