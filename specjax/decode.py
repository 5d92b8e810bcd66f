"""The decoding loop: prefill, then rounds of propose, verify and commit, all inside `jit`.

    tokens   a  b  c  d  e  .  .  .  .      e is pending: its keys and values are not in the cache
    propose                 x1 x2 x3        the drafter, given the committed tokens
    verify              [e  x1 x2 x3]       one forward pass of the target; row i is the law after i drafts
    accept              e   x1 y            x1 accepted, x2 rejected, y drawn from the residual at row 1
    tokens   a  b  c  d  e  x1 y  .  .      y is pending; the stale slots of x2 and x3 are overwritten later

Everything that may differ between requests (temperature, limits, seeds, end ids) is traced; the model,
drafter and rule are static. A finished row is frozen while others go on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from specjax import cache as kv
from specjax import sampling, verify
from specjax.drafter import Drafter
from specjax.types import Cache, Counts, Draft, Keys, Model, Params, Sampling, Target, Verdict

PREFILL_CHUNK = 64
"""Prompt tokens per pass: the loop's length is traced, so that prompts of any length share a compilation."""


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
    hidden: tuple[Float[Array, "B 1 T D"], ...]
    drafter: PyTree[Array]
    counts: Counts


@dataclass(frozen=True)
class Program:
    """What is compiled: the target model, the drafter and the rule. Static; equal programs compile once."""

    model: Model
    drafter: Drafter
    rule: verify.Rule = field(default_factory=verify.Token)
    offload: bool = False  # the drafter's weights lie in host memory (`specjax.offload`)

    @property
    def exact(self) -> bool:
        """Whether the rule is proven to keep the target's probabilities."""
        return verify.is_exact(self.rule)


def prefill(
    model: Model,
    params: Params,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    cache: Cache,
    taps: tuple[int, ...] = (),
) -> tuple[Float[Array, "B 1 D"], tuple[Float[Array, "B 1 T D"], ...], Cache]:
    """Read `tokens[:, :length]` chunk by chunk into `cache`.

    Returns:
      the hidden state of each row's last token, the tapped states of all slots, and the cache.
    """
    batch, slots = tokens.shape

    def outline() -> tuple[Array, tuple[Array, ...]]:
        out = model.forward(params, tokens[:, :1], cache, jnp.zeros_like(length), taps=taps)
        return out.hidden, out.taps

    shape, tap_shapes = jax.eval_shape(outline)
    last = jnp.zeros(shape.shape, shape.dtype)
    kept = tuple(jnp.zeros((batch, 1, slots, tap.shape[-1]), tap.dtype) for tap in tap_shapes)
    chunk = min(PREFILL_CHUNK, slots)
    steps = jnp.arange(chunk, dtype=jnp.int32)

    def body(carry: Any) -> Any:
        first, last, kept, cache = carry
        window = jnp.take(tokens, jnp.minimum(first + steps, slots - 1), axis=1)
        start = jnp.broadcast_to(first, length.shape)
        out = model.forward(params, window, cache, start, taps=taps)
        kept = tuple(kv.write(slots, tap[:, None], start) for slots, tap in zip(kept, out.taps, strict=True))
        index = length - 1 - first
        here = (index >= 0) & (index < chunk)
        row = jnp.take_along_axis(out.hidden, jnp.clip(index, 0, chunk - 1)[:, None, None], 1)
        return first + chunk, jnp.where(here[:, None, None], row, last), kept, out.cache

    longest = jnp.max(length)
    carry = (jnp.zeros((), jnp.int32), last, kept, cache)
    _, last, kept, cache = jax.lax.while_loop(lambda carry: carry[0] < longest, body, carry)
    return last, kept, cache


@functools.partial(jax.jit, static_argnames=("model", "cache_dtype", "taps"))
def read(
    model: Model,
    params: Params,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    limit: Int[Array, "B"],
    keys: Keys,
    end_ids: Int[Array, "E"],
    sampler: Sampling,
    cache_dtype: Any,
    taps: tuple[int, ...] = (),
) -> State:
    """Prefill the prompts and emit each row's first token, which belongs to no round. No drafter takes part."""
    batch, slots = tokens.shape
    cache = model.init_cache(batch, slots, cache_dtype)
    last, hidden, cache = prefill(model, params, tokens, length, cache, taps)
    logits = model.logits(params, last)
    law = sampling.log_probs(logits, sampler)[:, 0]
    first = sampling.draw(sampling.fold(sampling.fold(keys, 0), sampling.EXTRA), law)

    bad = _not_finite(logits)[:, 0] & (limit > length)
    emits = (limit > length) & ~bad
    tokens = _append(tokens, first[:, None], length, emits.astype(jnp.int32))
    length = length + emits.astype(jnp.int32)
    done = ~emits | (length >= limit) | jnp.any(first[:, None] == end_ids[None], -1)
    blank = jnp.zeros((batch, slots), jnp.int32)
    counts = Counts(blank, blank, blank, blank, blank.astype(jnp.float32), blank.astype(bool))
    ones = jnp.ones((batch,), jnp.int32)
    return State(tokens, length, limit, done, bad, keys, ones, end_ids, sampler, cache, hidden, (), counts)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def begin(program: Program, params: Params, drafter_params: Params, state: State) -> State:
    """Let the drafter make its own state for a batch that was read."""
    target = _seen(program, params, state)
    return replace(state, drafter=program.drafter.init(_fetched(program, drafter_params), target))


def start(
    program: Program,
    params: Params,
    drafter_params: Params,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    limit: Int[Array, "B"],
    keys: Keys,
    end_ids: Int[Array, "E"],
    sampler: Sampling,
    cache_dtype: Any,
) -> State:
    """`read`, which all drafters that tap the same layers share once compiled, and `begin`.

    Args:
      limit: the length at which a row stops: that of its prompt, and its budget of new tokens.
      keys: one a row, from which all of its randomness comes.
      end_ids: padded with -1.
    """
    taps = program.drafter.hidden_layers
    state = read(program.model, params, tokens, length, limit, keys, end_ids, sampler, cache_dtype, taps)
    return begin(program, params, drafter_params, state)


def propose(program: Program, params: Params, drafter_params: Params, state: State) -> Draft:
    """The first half of a round: what the drafter proposes, for finished rows too (it is ignored)."""
    keys = sampling.fold(sampling.fold(state.keys, state.round), sampling.DRAFT)
    target = _seen(program, params, state)
    return program.drafter.propose(keys, _fetched(program, drafter_params), state.drafter, target)


def _seen(program: Program, params: Params, state: State) -> Target:
    """What a drafter may see of a batch."""
    return Target(program.model, params, state.cache, state.tokens, state.length, state.hidden, state.sampling)


def _fetched(program: Program, drafter_params: Params) -> Params:
    """The drafter's weights on the device: brought in for one call where they lie in host memory."""
    if not program.offload:
        return drafter_params
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), drafter_params)


def settle(program: Program, params: Params, state: State, draft: Draft) -> State:
    """The second half: one pass of the target over pending token and draft, verification, commit."""
    model, batch = program.model, state.tokens.shape[0]
    live, cut = _live(state, draft, model.vocab_size)
    start = state.length - 1
    pending = jnp.take_along_axis(state.tokens, start[:, None], 1)
    window = jnp.concatenate([pending, jnp.where(live, draft.tokens, 0)], 1)
    depth, mask = _layout(draft)
    out = model.forward(params, window, draft.cache, start, depth=depth, mask=mask, taps=program.drafter.hidden_layers)
    logits = model.logits(params, out.hidden)
    keys = sampling.fold(state.keys, state.round)
    verdict = program.rule.verify(keys, sampling.log_probs(logits, state.sampling), draft, live)

    hidden = tuple(kv.write(slots, tap[:, None], start) for slots, tap in zip(state.hidden, out.taps, strict=True))
    cache = out.cache
    if draft.parents is not None:
        moved = kv.commit_path((*cache, *((slots, slots) for slots in hidden)), start, verdict.path)
        cache, hidden = moved[: len(cache)], tuple(slots for slots, _ in moved[len(cache) :])
    state = replace(state, cache=cache, hidden=hidden, drafter=draft.state)

    visited = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), verdict.path + 1], 1)
    used = jnp.concatenate([jnp.ones((batch, 1), bool), verdict.path >= 0], 1)
    bad = jnp.any(jnp.take_along_axis(_not_finite(logits), visited, 1) & used, 1) & ~state.done
    return _commit(state, draft, verdict, live, cut, bad)


def decode_round(program: Program, params: Params, drafter_params: Params, state: State) -> State:
    """One round: propose, verify, commit."""
    return settle(program, params, state, propose(program, params, drafter_params, state))


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def step(program: Program, params: Params, drafter_params: Params, state: State) -> State:
    """`decode_round`, compiled: for a host that wants to see every round."""
    return decode_round(program, params, drafter_params, state)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def run(program: Program, params: Params, drafter_params: Params, state: State) -> State:
    """Rounds until every row is done, without the host."""
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.done),
        lambda state: decode_round(program, params, drafter_params, state),
        state,
    )


def _not_finite(logits: Float[Array, "B S V"]) -> Bool[Array, "B S"]:
    return ~jnp.isfinite(jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), -1))


def _live(state: State, draft: Draft, vocab_size: int) -> tuple[Bool[Array, "B N"], Bool[Array, "B"]]:
    """Nodes that may be accepted: real, in range, within budget and cache, below live nodes only.

    The last token of the budget is always the further one, which no draft can fill. Also returned:
    rows whose draft the budget shortened.
    """
    above = verify.ancestors(draft)
    index = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    depth = above.sum(-1, dtype=jnp.int32)
    valid = (draft.tokens >= 0) & (draft.tokens < vocab_size) & (index < draft.count[:, None])
    fits = depth <= (state.limit - state.length - 1)[:, None]
    fits &= state.length[:, None] + index < state.tokens.shape[1]
    live = ~jnp.any(above & ~(valid & fits)[:, None], -1) & ~state.done[:, None]
    return live, jnp.any(valid & ~fits, -1)


def _layout(draft: Draft) -> tuple[Int[Array, "B S"] | None, Bool[Array, "B S S"] | None]:
    """Depth and mask of the window [pending, draft]; `None` for a chain, which is the model's default."""
    if draft.parents is None:
        return None, None
    above = verify.ancestors(draft)
    mask = jnp.pad(above, ((0, 0), (1, 0), (1, 0)))
    mask = mask.at[:, :, 0].set(True)
    return jnp.pad(above.sum(-1, dtype=jnp.int32), ((0, 0), (1, 0))), mask


def _append(
    tokens: Int[Array, "B T"], new: Int[Array, "B S"], length: Int[Array, "B"], count: Int[Array, "B"]
) -> Int[Array, "B T"]:
    steps = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(steps < count[:, None], length[:, None] + steps, tokens.shape[1])
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(new, mode="drop")


def _commit(
    state: State,
    draft: Draft,
    verdict: Verdict,
    live: Bool[Array, "B N"],
    cut: Bool[Array, "B"],
    bad: Bool[Array, "B"],
) -> State:
    """Append the accepted path and the further token, up to the first end id; count; move lengths."""
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
        drafted=record(state.counts.drafted, live.sum(-1, dtype=jnp.int32)),
        tested=record(state.counts.tested, verdict.tested),
        accepted=record(state.counts.accepted, jnp.minimum(verdict.accepted, emitted)),
        emitted=record(state.counts.emitted, emitted),
        overlap=record(state.counts.overlap, verdict.overlap),
        cut=record(state.counts.cut, cut | (emitted < verdict.accepted + 1)),
    )
    length = state.length + emitted
    return replace(
        state,
        tokens=_append(state.tokens, new, state.length, emitted),
        length=length,
        done=state.done | bad | (active & ended) | (length >= state.limit),
        bad=state.bad | bad,
        round=state.round + active.astype(jnp.int32),
        counts=counts,
    )


def _record(row: Int[Array, "B"], at: Int[Array, "B"], log: Array | np.ndarray, value: Array) -> Array:
    return jnp.asarray(log).at[row, at].set(value.astype(log.dtype), mode="drop")
