"""What a batch carries from round to round, the window that a round adds to it, and the commit of what was accepted."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from specjax import verify
from specjax.types import Cache, Counts, Draft, Keys, Sampling, Verdict


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a batch carries from round to round; donated, so don't use one after it was passed on."""

    tokens: Int[Array, "B T"]
    length: Int[Array, "B"]
    limit: Int[Array, "B"]  # length at which a row's token budget is spent
    done: Bool[Array, "B"]
    bad: Bool[Array, "B"]  # the target's logits had a NaN or no finite maximum where a token was due
    keys: Keys
    round: Int[Array, "B"]
    end_ids: Int[Array, "E"]  # padded with -1
    sampling: Sampling
    cache: Cache
    drafter: PyTree[Array]
    counts: Counts


@dataclass(frozen=True)
class Window:
    """Pending token and draft, as one pass of the target reads them."""

    tokens: Int[Array, "B S"]
    positions: Int[Array, "B S"] | None  # None: a chain
    mask: Bool[Array, "B S S"] | None
    live: Bool[Array, "B N"]  # nodes that may be accepted
    cut: Bool[Array, "B"]  # rows whose draft the budget shortened


def lay_out(state: State, draft: Draft, vocab_size: int) -> Window:
    """The window, and which of its nodes may be accepted: real, in range, within budget and cache, below live ones.

    The last token of the budget is always the bonus token, which no draft can fill.
    """
    above = verify.ancestors(draft)
    depth = above.sum(-1, dtype=jnp.int32)
    index = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    valid = (draft.tokens >= 0) & (draft.tokens < vocab_size)
    if draft.count is not None:
        valid &= index < draft.count[:, None]
    fits = depth <= (state.limit - state.length - 1)[:, None]
    fits &= state.length[:, None] + index < state.tokens.shape[1]
    live = ~jnp.any(above & ~(valid & fits)[:, None], -1) & ~state.done[:, None]

    start = (state.length - 1)[:, None]
    pending = jnp.take_along_axis(state.tokens, start, 1)
    tokens = jnp.concatenate([pending, jnp.where(live, draft.tokens, 0)], 1)
    positions = mask = None
    if draft.parents is not None:
        positions = start + jnp.pad(depth, ((0, 0), (1, 0)))
        mask = jnp.pad(above, ((0, 0), (1, 0), (1, 0))).at[:, :, 0].set(True)
    return Window(tokens, positions, mask, live, jnp.any(valid & ~fits, -1))


def commit(state: State, draft: Draft, verdict: Verdict, window: Window, bad: Bool[Array, "B"]) -> State:
    """Append the accepted path and the bonus token, up to the first end id; count; move lengths."""
    steps = jnp.arange(verdict.path.shape[1] + 1, dtype=jnp.int32)[None]
    path = jnp.pad(verdict.path, ((0, 0), (0, 1)))
    drafted = jnp.pad(draft.tokens, ((0, 0), (0, 1)))  # one column more, so that an empty draft can be indexed
    taken = jnp.take_along_axis(drafted, jnp.maximum(path, 0), 1)
    new = jnp.where(steps == verdict.accepted[:, None], verdict.bonus[:, None], taken)
    ends = jnp.any(new[:, :, None] == state.end_ids[None, None], -1) & (steps <= verdict.accepted[:, None])
    ended = jnp.any(ends, -1)
    emitted = jnp.where(ended, jnp.argmax(ends, -1).astype(jnp.int32), verdict.accepted) + 1
    active = ~state.done & ~bad
    emitted = jnp.where(active, emitted, 0)

    at = jnp.where(active, state.round - 1, state.tokens.shape[1])
    record = functools.partial(_record, jnp.arange(at.shape[0]), at)
    counts = Counts(
        drafted=record(state.counts.drafted, window.live.sum(-1, dtype=jnp.int32)),
        tested=record(state.counts.tested, verdict.tested),
        accepted=record(state.counts.accepted, jnp.minimum(verdict.accepted, emitted)),
        emitted=record(state.counts.emitted, emitted),
        overlap=record(state.counts.overlap, verdict.overlap),
        cut=record(state.counts.cut, window.cut | (emitted < verdict.accepted + 1)),
    )
    length = state.length + emitted
    return replace(
        state,
        tokens=append(state.tokens, new, state.length, emitted),
        length=length,
        done=state.done | bad | (active & ended) | (length >= state.limit),
        bad=state.bad | bad,
        round=state.round + active.astype(jnp.int32),
        counts=counts,
    )


def append(
    tokens: Int[Array, "B T"], new: Int[Array, "B S"], length: Int[Array, "B"], count: Int[Array, "B"]
) -> Int[Array, "B T"]:
    """Write the first `count` of some new tokens behind each row's text."""
    steps = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(steps < count[:, None], length[:, None] + steps, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(new, mode="drop")


def _record(row: Int[Array, "B"], at: Int[Array, "B"], log: Array | np.ndarray, value: Array) -> Array:
    return jnp.asarray(log).at[row, at].set(value.astype(log.dtype), mode="drop")
