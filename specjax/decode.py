"""The decoding loop: prefill, then rounds of propose, verify, commit and observe, all inside `jit`.

    tokens   a  b  c  d  e  .  .  .  .      e is pending: its keys and values are not in the cache
    propose                 x1 x2 x3        the drafter, given the committed tokens
    window              [e  x1 x2 x3]       one forward pass of the target; row i: probabilities after i drafts
    verify              e   x1 y            x1 accepted, x2 rejected, the bonus token y drawn from the residual at row 1
    commit   a  b  c  d  e  x1 y  .  .      y is pending; the stale slots of x2 and x3 are overwritten later
    observe             [e  x1]             what the target has read now: the drafter may learn from it

Everything that may differ between requests (temperature, limits, seeds, end ids) is traced; the model,
drafter and rule are static. A finished row is frozen while others go on.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax import sampling, verify
from specjax.drafter import Drafter
from specjax.state import State, append, check_draft, check_kept, commit, lay_out
from specjax.types import Cache, Counts, Draft, Model, Params, Prompts, Seen, Target, Verified

PREFILL_CHUNK = 64
"""Prompt tokens per pass: prompts of any length share a compilation, and hidden states are held for one chunk."""


@dataclass(frozen=True)
class Program:
    """What is compiled: the target model, the drafter and the rule. Static; equal programs compile once."""

    model: Model
    drafter: Drafter
    rule: verify.Rule = field(default_factory=verify.Token)

    @property
    def exact(self) -> bool:
        """Whether the target's distribution is kept: a proven rule."""
        return verify.is_exact(self.rule)


def init_state(program: Program, params: Params, drafter_params: Params, prompts: Prompts, cache_dtype: Any) -> State:
    """A batch of which nothing was read yet. From shapes (`jax.eval_shape`) it is what the accountant counts."""
    batch, capacity = prompts.tokens.shape
    dtype = jnp.dtype(cache_dtype)
    blank, rows = jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32)
    return State(
        tokens=prompts.tokens,
        length=prompts.length,
        limit=prompts.limit,
        done=rows > 0,
        bad=rows > 0,
        keys=prompts.keys,
        round=rows + 1,
        end_ids=prompts.end_ids,
        sampling=prompts.sampling,
        cache=program.model.init_cache(batch, capacity, dtype),
        drafter=program.drafter.init(drafter_params, program.model, batch, capacity, dtype),
        counts=Counts(blank, blank, blank, blank, blank.astype(jnp.float32), blank > 0),
    )


def start(
    program: Program,
    params: Params,
    drafter_params: Params,
    prompts: Prompts,
    cache_dtype: Any,
    longest: int | None = None,
) -> State:
    """Prefill: read the prompts chunk by chunk, the drafter after the target, and emit each row's first token.

    The target's passes know no drafter: all that tap the same layers share their compilations.

    Args:
      longest: of the prompts' lengths, where the host knows it; chunks beyond it are left out.
    """
    state = empty(program, params, drafter_params, prompts, cache_dtype=cache_dtype)
    last = jnp.zeros_like(program.model.embed(params, prompts.tokens[:, :1]))
    taps = program.drafter.tapped_layers(program.model)
    for first in range(0, longest or prompts.tokens.shape[1], PREFILL_CHUNK):
        offset = jnp.asarray(first, jnp.int32)
        cache, last, hidden = read_chunk(program.model, params, prompts, offset, state.cache, last, taps=taps)
        state = replace(state, cache=cache)
        state = observe_chunk(program, params, drafter_params, prompts, offset, state, hidden)
    begun = first_token(program.model, params, replace(state, drafter=()), last)
    return replace(begun, drafter=state.drafter)


@functools.partial(jax.jit, static_argnames=("program", "cache_dtype"))
def empty(program: Program, params: Params, drafter_params: Params, prompts: Prompts, cache_dtype: Any) -> State:
    """`init_state`, compiled."""
    return init_state(program, params, drafter_params, prompts, cache_dtype)


@functools.partial(jax.jit, static_argnames=("model", "taps"), donate_argnames=("cache",))
def read_chunk(
    model: Model,
    params: Params,
    prompts: Prompts,
    first: Int[Array, ""],
    cache: Cache,
    last: Float[Array, "B 1 D"],
    taps: tuple[int, ...] = (),
) -> tuple[Cache, Float[Array, "B 1 D"], tuple[Float[Array, "B S D"], ...]]:
    """Read slots `first ...` of the prompts into the cache.

    Returns:
      the cache, the hidden state of each row's last token (once its chunk was read), the tapped states of the chunk.
    """
    window, start, _ = _chunk(prompts, first)
    out = model.forward(params, window, cache, start, taps=taps)
    index = prompts.length - 1 - first
    here = (index >= 0) & (index < window.shape[1])
    row = jnp.take_along_axis(out.hidden, jnp.clip(index, 0, window.shape[1] - 1)[:, None, None], 1)
    return out.cache, jnp.where(here[:, None, None], row, last), out.taps


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def observe_chunk(
    program: Program,
    params: Params,
    drafter_params: Params,
    prompts: Prompts,
    first: Int[Array, ""],
    state: State,
    hidden: tuple[Float[Array, "B S D"], ...],
) -> State:
    """Let the drafter see a chunk of the prompts."""
    seen = Seen(view(program, params, state), *_chunk(prompts, first), hidden)
    return _observe(program, drafter_params, state, seen)


def _chunk(prompts: Prompts, first: Int[Array, ""]) -> tuple[Int[Array, "B S"], Int[Array, "B"], Int[Array, "B"]]:
    """Tokens of a chunk, where each row's first one stands, and how many are real."""
    capacity = prompts.tokens.shape[1]
    width = min(PREFILL_CHUNK, capacity)
    steps = first + jnp.arange(width, dtype=jnp.int32)
    window = jnp.take(prompts.tokens, jnp.minimum(steps, capacity - 1), axis=1)
    return window, jnp.broadcast_to(first, prompts.length.shape), jnp.clip(prompts.length - first, 0, width)


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def first_token(model: Model, params: Params, state: State, last: Float[Array, "B 1 D"]) -> State:
    """Draw each row's first token behind its prompt. It belongs to no round; no drafter takes part."""
    logits = model.logits(params, last)
    log_p = sampling.log_probs(logits, state.sampling)[:, 0]
    token = sampling.draw(sampling.fold(sampling.fold(state.keys, 0), sampling.BONUS), log_p)
    wanted = state.limit > state.length
    bad = _not_finite(logits)[:, 0] & wanted
    emits = wanted & ~bad
    length = state.length + emits.astype(jnp.int32)
    return replace(
        state,
        tokens=append(state.tokens, token[:, None], state.length, emits.astype(jnp.int32)),
        length=length,
        done=~emits | (length >= state.limit) | jnp.any(token[:, None] == state.end_ids[None], -1),
        bad=bad,
    )


def view(program: Program, params: Params, state: State) -> Target:
    """What a drafter may see of a batch."""
    return Target(program.model, params, state.cache, state.tokens, state.length, state.sampling)


def decode_round(program: Program, params: Params, drafter_params: Params, state: State) -> State:
    """One round; see the drawing at the head of this file."""
    return verify_and_commit(program, params, drafter_params, state, propose(program, params, drafter_params, state))


def propose(program: Program, params: Params, drafter_params: Params, state: State) -> Draft:
    """The first half of a round: what the drafter proposes, for finished rows too (it is ignored).

    Raises:
      DraftError: when traced, a draft of another form than `specjax.types.Draft` says.
    """
    keys = sampling.fold(sampling.fold(state.keys, state.round), sampling.DRAFT)
    draft = program.drafter.propose(keys, drafter_params, state.drafter, view(program, params, state))
    check_draft(type(program.drafter).__name__, draft, state, program.model.vocab_size)
    return draft


def _observe(program: Program, drafter_params: Params, state: State, seen: Seen) -> State:
    kept = program.drafter.observe(drafter_params, state.drafter, seen)
    check_kept(type(program.drafter).__name__, "its state", "observe", state.drafter, kept)
    return replace(state, drafter=kept)


def verify_and_commit(program: Program, params: Params, drafter_params: Params, state: State, draft: Draft) -> State:
    """The second half: one pass of the target over pending token and draft, verification, commit, observation."""
    start = state.length - 1
    window = lay_out(state, draft, program.model.vocab_size)
    out = program.model.forward(
        params, window.tokens, draft.cache, start,
        positions=window.positions, mask=window.mask, taps=program.drafter.tapped_layers(program.model),
    )  # fmt: skip
    logits = program.model.logits(params, out.hidden)
    log_p = sampling.log_probs(logits, state.sampling)
    verdict = program.rule.verify(sampling.fold(state.keys, state.round), log_p, draft, window.live)

    read = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))  # rows of the window along the accepted path
    bad = jnp.any(jnp.take_along_axis(_not_finite(logits), read, 1) & _real(read), 1) & ~state.done
    cache = out.cache if draft.parents is None else kv.commit_path(out.cache, start, verdict.path)
    after = commit(replace(state, cache=cache, drafter=draft.state), draft, verdict, window, bad)

    seen = Seen(
        target=view(program, params, after),
        tokens=jnp.take_along_axis(window.tokens, read, 1),
        start=start,
        count=after.length - state.length,
        hidden=tuple(jnp.take_along_axis(tap, read[..., None], 1) for tap in out.taps),
        verified=Verified(replace(draft, cache=cache, state=()), verdict, log_p),
    )
    return _observe(program, drafter_params, after, seen)


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


def _real(read: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """The pending token, and rows of nodes: what lies behind the accepted path points at the pending token again."""
    return (read > 0) | (jnp.arange(read.shape[1], dtype=jnp.int32)[None] == 0)
