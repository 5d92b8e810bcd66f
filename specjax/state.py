"""What a batch carries from round to round, the window that a round adds to it, and the commit of what was accepted.

What a drafter hands back is held to its shapes while it is traced: a broadcast or a clamped index would be a bias that
no error shows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

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


class DraftError(ValueError):
    """What a drafter handed back does not fit; the message names the drafter, the field, and what is expected."""


def check_draft(name: str, draft: Any, state: State, vocab_size: int) -> None:
    """Hold a draft to its shapes and dtypes; costs nothing once it is traced.

    Raises:
      DraftError: naming the field.
    """
    rows, slots = state.tokens.shape
    if not isinstance(draft, Draft):
        raise DraftError(f"{name}.propose returned {type(draft).__name__}: return a specjax.Draft")
    nodes: Any = draft.tokens.shape[1] if getattr(draft.tokens, "ndim", 0) == 2 else "N"
    fields: dict[str, tuple[Any, Any]] = {
        "tokens": ((rows, nodes), jnp.int32),
        "log_q": ((rows, nodes, vocab_size), jnp.float32),
        "count": ((rows,), jnp.int32),
        "parents": ((nodes,) if getattr(draft.parents, "ndim", 0) == 1 else (rows, nodes), jnp.int32),
    }
    for field, (shape, dtype) in fields.items():
        value = getattr(draft, field)
        wanted = f"{jnp.dtype(dtype)}[{', '.join(map(str, shape))}]"
        if field != "tokens" and value is None:
            continue
        if not isinstance(value, jax.Array | np.ndarray) or (value.shape, value.dtype) != (shape, dtype):
            found = _shapes(value) if isinstance(value, jax.Array | np.ndarray) else [type(value).__name__]
            raise DraftError(f"{name}: `{field}` of its draft is {found[0]}, expected {wanted}")
    if nodes >= slots:
        raise DraftError(f"{name} drafts {nodes} tokens, which do not fit into {slots} cache slots")
    if not (draft.depth is None or (type(draft.depth) is int and draft.depth >= 0)):
        raise DraftError(f"{name}: `depth` of its draft is {draft.depth!r}, expected an int from 0, or None")
    check_kept(name, "its target's cache", "propose", state.cache, draft.cache)
    check_kept(name, "its state", "propose", state.drafter, draft.state)


def check_kept(name: str, what: str, method: str, before: Any, after: Any) -> None:
    """What goes from round to round keeps its form.

    Raises:
      DraftError: another tree, shape or dtype.
    """
    trees: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    was, found = _shapes(before), _shapes(after)
    if trees[0] != trees[1] or was != found:
        first = next((pair for pair in zip(was, found, strict=False) if pair[0] != pair[1]), trees)
        rule = f"{what} must keep its tree, shapes and dtypes"
        raise DraftError(f"{name}: {rule}; it was {first[0]}, `{method}` returns {first[1]}")


def _shapes(tree: Any) -> list[str]:
    return [f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in jax.tree.leaves(tree)]


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
