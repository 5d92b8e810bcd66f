"""Counting continuations: the whole decoding loop over large batches, inside one compiled function.

A batch mixes sampling settings, prompts of several lengths and contexts; each row's continuation falls
into a cell of its case. Nothing but counts leaves the device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, Num

from specjax import decode, sampling
from specjax.exactness.subjects import Subject
from specjax.types import Draft, Params, Prompts, Sampling

BATCH = 1 << 10
"""Small: a batch decodes until its slowest row is done, and its arrays should stay in a core's cache."""

REPLAY_EVERY = 4
"""Batches whose first drafts are drawn again (a second draft of each row costs time)."""


@dataclass(frozen=True)
class Setting:
    """One way of sampling, as the command line spells it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    weight: int = 1  # share of a batch

    def __str__(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        for name in ("top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if value != (1.0 if name == "top_p" else 0):
                parts.append(f"{name.replace('_', '-')} {value:g}")
        return ", ".join(parts)

    def sampler(self) -> Sampling:
        """For one row."""
        return sampling.make_sampling(1, self.temperature, self.top_k, self.top_p, self.min_p)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """What a batch of sequences is reduced to; one row a case."""

    cells: Num[Array | np.ndarray, "C M"]  # the last column: continuations with an id that isn't counted, or cut short
    accepted: Num[Array | np.ndarray, "C K+1"]  # histogram of the first round's accepted drafts
    surplus: Num[Array | np.ndarray, "C"]  # sum over sequences of (accepted - overlap)
    surplus_squared: Num[Array | np.ndarray, "C"]
    overlap: Num[Array | np.ndarray, "C"]
    drawn: Num[Array | np.ndarray, "C K"]  # drafts of the first round at each position
    replayed: Num[
        Array | np.ndarray, "C K"
    ]  # of these, drafts that the round's noise draws again from the reported law
    chance: Num[Array | np.ndarray, "C K"]  # how many would agree if their noise were another
    spread: Num[Array | np.ndarray, "C K"]  # variance of the latter


Loop = Callable[[decode.Program, Params, Params, decode.State], decode.State]


@dataclass(frozen=True)
class Cases:
    """The rows of a batch: every prompt under every setting. `case` numbers (context, setting)."""

    tokens: np.ndarray
    length: np.ndarray
    case: np.ndarray
    sampler: Sampling
    count: int


def make_cases(subject: Subject, settings: Sequence[Setting], new_tokens: int, batch: int = BATCH) -> Cases:
    """Lay out a batch. Each context has as many rows as every other, up to rounding."""
    longest = max(map(len, subject.contexts))
    rows = [
        (context * len(settings) + index, prompt, setting)
        for index, setting in enumerate(settings)
        for context, prompts in enumerate(subject.contexts)
        for prompt in (prompts * longest * setting.weight)[: longest * setting.weight]
    ]
    rows = [rows[i % len(rows)] for i in range(batch)]
    tokens = np.zeros((batch, max(len(prompt) for _, prompt, _ in rows) + new_tokens), np.int32)
    for row, (_, prompt, _) in enumerate(rows):
        tokens[row, : len(prompt)] = prompt
    columns = {
        name: [getattr(setting, name) for _, _, setting in rows] for name in ("temperature", "top_k", "top_p", "min_p")
    }
    return Cases(
        tokens,
        np.array([len(prompt) for _, prompt, _ in rows], np.int32),
        np.array([case for case, _, _ in rows], np.int32),
        sampling.make_sampling(batch, **columns),
        len(subject.contexts) * len(settings),
    )


@functools.partial(jax.jit, static_argnames=("program", "loop", "new_tokens", "vocab", "cases"))
def tally_batch(
    program: decode.Program,
    loop: Loop,
    params: Params,
    drafter_params: Params,
    tokens: Int[Array, "B T"],
    length: Int[Array, "B"],
    case: Int[Array, "B"],
    sampler: Sampling,
    key: Key[Array, ""],
    end_id: Int[Array, "1"],
    replays: Bool[Array, ""],
    *,
    new_tokens: int,
    vocab: int,
    cases: int,
) -> Tally:
    """Decode `new_tokens` in every row and count."""
    batch = tokens.shape[0]
    prompts = Prompts(tokens, length, length + new_tokens, jax.random.split(key, batch), end_id, sampler)
    state = decode.start(program, params, drafter_params, prompts, jnp.float32)
    replay = _replay(program, params, drafter_params, state, replays)
    state = loop(program, params, drafter_params, state)
    index = length[:, None] + jnp.arange(new_tokens, dtype=jnp.int32)[None]
    new = jnp.take_along_axis(state.tokens, index, 1)
    ended = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1) == end_id[None]
    new = jnp.where(ended & (index >= state.length[:, None]), end_id[None], new)
    whole = (state.length == length + new_tokens) | ended[:, 0]
    counted = jnp.all((new >= 0) & (new < vocab), 1) & whole & ~state.bad
    code = jnp.zeros((batch,), jnp.int32)
    for position in range(new_tokens):
        code = code * vocab + new[:, position]
    code = jnp.where(counted, code, vocab**new_tokens)

    counts = state.counts
    surplus = (counts.accepted.astype(jnp.float32) - counts.overlap).sum(1)
    add = functools.partial(jax.ops.segment_sum, segment_ids=case, num_segments=cases)
    cells = jnp.zeros((cases, vocab**new_tokens + 1), jnp.int32).at[case, code].add(1)
    most = program.drafter.num_speculative_tokens
    accepted = jnp.zeros((cases, most + 1), jnp.int32).at[case, jnp.clip(counts.accepted[:, 0], 0, most)].add(1)
    return Tally(cells, accepted, add(surplus), add(surplus**2), add(counts.overlap.sum(1)), *map(add, replay))


def _replay(
    program: decode.Program, params: Params, drafter_params: Params, state: decode.State, wanted: Bool[Array, ""]
) -> tuple[Array, Array, Array, Array]:
    """Whether the first round's drafts are what its keys draw from the laws reported for them; zeros if not wanted."""
    propose = functools.partial(decode.propose, program, params, drafter_params, state)
    outline = jax.eval_shape(propose)
    nothing = (jnp.zeros(outline.tokens.shape, jnp.float32),) * 4
    if outline.log_q is None or outline.tokens.shape[1] == 0:
        return nothing
    return jax.lax.cond(wanted, lambda: _compare(propose(), state), lambda: nothing)


def _compare(draft: Draft, state: decode.State) -> tuple[Array, Array, Array, Array]:
    """Drafts that are real, those drawn again, and mean and variance of the latter were the noise another."""
    assert draft.log_q is not None
    nodes = draft.tokens.shape[1]
    keys = sampling.fold(sampling.fold(state.keys, state.round), sampling.DRAFT)
    laws, steps = jnp.swapaxes(draft.log_q, 0, 1), jnp.arange(nodes, dtype=jnp.int32)
    again = jax.lax.map(lambda node: sampling.draw(sampling.fold(keys, node[0]), node[1]), (steps, laws)).T
    count = jnp.full(keys.shape, nodes) if draft.count is None else draft.count
    real = (jnp.arange(nodes, dtype=jnp.int32)[None] < count[:, None]).astype(jnp.float32)
    chance = jnp.exp(2 * draft.log_q).sum(-1)
    same = (again == draft.tokens).astype(jnp.float32)
    return real, real * same, real * chance, real * chance * (1 - chance)


def sample(
    program: decode.Program,
    subject: Subject,
    drafter_params: Params,
    settings: Sequence[Setting],
    *,
    new_tokens: int,
    samples: int,
    seed: int,
    batch: int = BATCH,
    loop: Loop = decode.run,
    end_id: int = -1,
    cases: Cases | None = None,
) -> Iterator[Tally]:
    """Running totals, one after each batch, until at least `samples` sequences were drawn.

    After `end_id` a continuation is filled up with it: the cell of a sequence that ended.
    """
    cases = cases or make_cases(subject, settings, new_tokens, batch)
    batch = len(cases.case)
    device = jax.tree.map(jnp.asarray, (cases.tokens, cases.length, cases.case, cases.sampler))

    def count(number: int) -> Tally:
        got = tally_batch(
            program, loop, subject.params, drafter_params, *device,
            jax.random.fold_in(jax.random.key(seed), number), jnp.full((1,), end_id, jnp.int32),
            jnp.asarray(number % REPLAY_EVERY == 0), new_tokens=new_tokens, vocab=subject.tokens, cases=cases.count,
        )  # fmt: skip
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), got)

    total = count(0)  # compiles
    yield total
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # arrays this small leave cores idle
        for got in pool.map(count, range(1, -(-samples // batch))):
            total = jax.tree.map(np.add, total, got)
            yield total
