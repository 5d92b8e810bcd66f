"""Prompt lookup: propose what followed the last occurrence of the current suffix.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). The longest suffix of
`prompt_lookup_max .. prompt_lookup_min` tokens that occurred before wins; among equal ones the latest.
The proposal is a point mass, which is exact for any proposer; it has no weights and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from specjax.drafter import Drafter
from specjax.types import Draft, Keys, Params, Target

UNROLLED = 8
"""Longer matches are looked for in a loop, so that what is compiled does not grow with them."""


@dataclass(frozen=True)
class NGram(Drafter):
    """n-gram prompt lookup: copies what followed the last match, no weights, no cache"""

    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max}: "
                "must be 1 <= min <= max"
            )

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        """Copy up to `num_speculative_tokens` committed tokens, never beyond the last one."""
        first, count = find_match(target.tokens, target.length, self.prompt_lookup_max, self.prompt_lookup_min)
        steps = jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None]
        index = jnp.minimum(first[:, None] + steps, target.tokens.shape[1] - 1)
        tokens = jnp.take_along_axis(target.tokens, index, 1)
        return Draft(tokens, None, target.cache, state, jnp.minimum(count, self.num_speculative_tokens))


def find_match(
    tokens: Int[Array, "B T"], length: Int[Array, "B"], longest: int, shortest: int
) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
    """Where the continuation of the best match starts, and how many committed tokens it has (0: no match)."""
    slots = tokens.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32)[None]

    def look_back(back: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        run, alive = carry
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - back, 0)[:, None], 1)
        earlier = jnp.take(tokens, jnp.maximum(slot[0] - back, 0), axis=1)
        alive = alive & (slot >= back) & (length[:, None] > back) & (earlier == last)
        return run + alive.astype(jnp.int32), alive

    # tokens that agree, reading backwards from a slot and from the end; a match ends before the last token
    run, alive = jnp.zeros_like(tokens), slot < (length - 1)[:, None]
    run, _ = jax.lax.fori_loop(0, min(longest, slots), look_back, (run, alive), unroll=longest <= UNROLLED)
    best = jnp.max(run, 1, keepdims=True)
    end = jnp.max(jnp.where((run == best) & (run >= shortest), slot, -1), 1)
    return end + 1, jnp.where(end >= 0, length - 1 - end, 0)
