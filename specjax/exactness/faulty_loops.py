"""Decoding loops with one fault each, around the production round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode


def late_end(program: decode.Program, params: Any, drafter_params: Any, state: decode.State) -> decode.State:
    """End-of-sequence is looked for in a round's last token only."""
    ends = state.end_ids

    def body(state: decode.State) -> decode.State:
        blind = replace(state, end_ids=jnp.full_like(ends, -1))
        state = replace(decode.decode_round(program, params, drafter_params, blind), end_ids=ends)
        last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)
        return replace(state, done=state.done | jnp.any(last == ends[None], -1))

    return jax.lax.while_loop(lambda state: ~jnp.all(state.done), body, state)


def extra_counted(program: decode.Program, params: Any, drafter_params: Any, state: decode.State) -> decode.State:
    """The further token is counted as an accepted draft."""
    state = decode.run(program, params, drafter_params, state)
    return replace(state, counts=replace(state.counts, accepted=state.counts.emitted))
