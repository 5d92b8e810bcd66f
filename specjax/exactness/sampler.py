"""Counting continuations: the whole decoding loop over large batches, inside one compiled function.

A batch mixes sampling settings, prompts of several lengths and contexts; each row's continuation falls
into a cell of its case. Nothing but counts leaves the device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Num, PyTree

from specjax import decode, sampling
from specjax.exactness.experiment import BATCH, Cases, Experiment, Loop, make_cases
from specjax.types import Counts, Draft, Params, Prompts

REPLAY_EVERY = 4
"""Batches whose first drafts are drawn again (a second draft of each row costs time)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tally:
    """What a batch of sequences is reduced to; one row a case."""

    cells: Num[Array | np.ndarray, "C M"]  # the last column: continuations with an id that isn't counted, or cut short
    accepted: Num[Array | np.ndarray, "C K+1"]  # histogram of the first round's accepted drafts
    surplus: Num[Array | np.ndarray, "C"]  # sum over sequences of (accepted - overlap)
    surplus_squared: Num[Array | np.ndarray, "C"]
    drawn: Num[Array | np.ndarray, "C K"]  # drafts of the first round at each position
    replayed: Num[Array | np.ndarray, "C K"]  # of these, those that the round's noise draws again from the law reported
    chance: Num[Array | np.ndarray, "C K"]  # how many would agree if their noise were another
    spread: Num[Array | np.ndarray, "C K"]  # variance of the latter
    drafted: Num[Array | np.ndarray, "C K+1"]  # histogram of the drafts that a round had to verify, of all rounds

    def replays(self, cases: slice = slice(None)) -> list[np.ndarray]:
        """Of some cases, what `compare_drafts` found."""
        return [np.asarray(part)[cases] for part in (self.drawn, self.replayed, self.chance, self.spread)]

    def mean_accepted(self, case: int) -> float:
        """Drafts accepted in a first round."""
        counts = self.accepted[case]
        return float((counts * np.arange(len(counts))).sum() / counts.sum())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Finished:
    """What is counted of a decoded batch."""

    tokens: Int[Array, "B T"]
    length: Int[Array, "B"]
    bad: Bool[Array, "B"]
    counts: Counts


@dataclass(frozen=True)
class Counting:
    """What is compiled into the counting of a batch."""

    program: decode.Program
    loop: Loop
    new_tokens: int
    vocab: int
    cases: int
    rows: int = 0  # that decode together, where a batch is many batches; 0: all


@functools.partial(jax.jit, static_argnames="counting")
def tally_batch(
    counting: Counting, params: Params, drafter_params: Params, prompts: Prompts, case: Int[Array, "B"],
    replays: Bool[Array, ""],
) -> Tally:  # fmt: skip
    """Decode `new_tokens` in every row and count."""
    program, new_tokens, vocab = counting.program, counting.new_tokens, counting.vocab
    length, end_id = prompts.length, prompts.end_ids
    state, replay = _decode(counting, params, drafter_params, prompts, replays)
    index = length[:, None] + jnp.arange(new_tokens, dtype=jnp.int32)[None]
    new = jnp.take_along_axis(state.tokens, index, 1)
    ended = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1) == end_id[None]
    new = jnp.where(ended & (index >= state.length[:, None]), end_id[None], new)
    whole = (state.length == length + new_tokens) | ended[:, 0]
    counted = jnp.all((new >= 0) & (new < vocab), 1) & whole & ~state.bad
    code = jnp.zeros_like(length)
    for position in range(new_tokens):
        code = code * vocab + new[:, position]
    code = jnp.where(counted, code, vocab**new_tokens)

    counts = state.counts
    surplus = (counts.accepted.astype(jnp.float32) - counts.overlap).sum(1)
    add = functools.partial(jax.ops.segment_sum, segment_ids=case, num_segments=counting.cases)
    cells = jnp.zeros((counting.cases, vocab**new_tokens + 1), jnp.int32).at[case, code].add(1)
    most = program.drafter.num_speculative_tokens
    first = jnp.clip(counts.accepted[:, 0], 0, most)
    accepted = jnp.zeros((counting.cases, most + 1), jnp.int32).at[case, first].add(1)
    nodes = replay[0].shape[1]
    drafted = jnp.zeros((counting.cases, nodes + 1), jnp.int32)
    drafted = drafted.at[case[:, None], counts.drafted].add((counts.emitted > 0).astype(jnp.int32), mode="drop")
    drawn, replayed, chance, spread = map(add, replay)
    return Tally(cells, accepted, add(surplus), add(surplus**2), drawn, replayed, chance, spread, drafted)


def _decode(
    counting: Counting, params: Params, drafter_params: Params, prompts: Prompts, replays: Bool[Array, ""]
) -> tuple[Finished, tuple[Array, Array, Array, Array]]:
    """The finished batch and its first drafts drawn again; rows that decode together know of no others."""
    program, rows = counting.program, counting.rows

    def together(*own: Any) -> PyTree[Array]:
        tokens, length, limit, keys, filters = own
        batch = Prompts(tokens, length, limit, keys, prompts.end_ids, filters)
        state = decode.start(program, params, drafter_params, batch, jnp.float32)
        replay = replay_drafts(program, params, drafter_params, state, replays)
        state = counting.loop(program, params, drafter_params, state)
        return Finished(state.tokens, state.length, state.bad, state.counts), replay

    own = prompts.tokens, prompts.length, prompts.limit, prompts.keys, prompts.sampling
    if not rows:
        return together(*own)
    batch = len(prompts.length)
    out = jax.vmap(together)(*jax.tree.map(lambda leaf: leaf.reshape(batch // rows, rows, *leaf.shape[1:]), own))
    return jax.tree.map(lambda leaf: leaf.reshape(batch, *leaf.shape[2:]), out)


def replay_drafts(
    program: decode.Program, params: Params, drafter_params: Params, state: decode.State, wanted: Bool[Array, ""]
) -> tuple[Array, Array, Array, Array]:
    """Whether a round's drafts are what its keys draw from the laws reported for them; zeros if not wanted."""
    propose = functools.partial(decode.propose, program, params, drafter_params, state)
    outline = jax.eval_shape(propose)
    nothing = (jnp.zeros(outline.tokens.shape, jnp.float32),) * 4
    if outline.log_q is None or outline.tokens.shape[1] == 0:
        return nothing
    return jax.lax.cond(wanted, lambda: compare_drafts(propose(), state), lambda: nothing)


def compare_drafts(draft: Draft, state: decode.State) -> tuple[Array, Array, Array, Array]:
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
    experiment: Experiment, samples: int, seed: int, *, batch: int = BATCH, cases: Cases | None = None
) -> Iterator[Tally]:
    """Running totals, one after each batch, until at least `samples` sequences were drawn."""
    cases = cases or make_cases(experiment, batch)
    program, subject = experiment.program, experiment.subject
    counting = Counting(
        program, experiment.loop, experiment.length, subject.tokens, cases.count, experiment.condition.rows
    )
    own = program.drafter.params(jax.random.key(experiment.drafter_seed), subject.model, subject.params)
    case, batch = jnp.asarray(cases.case), len(cases.case)

    def count(number: int) -> Tally:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), batch)
        prompts, replays = replace(cases.prompts, keys=keys), jnp.asarray(number % REPLAY_EVERY == 0)
        got = tally_batch(counting, subject.params, own, prompts, case, replays)
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), got)

    total = count(0)  # compiles
    yield total
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # arrays this small leave cores idle
        for got in pool.map(count, range(1, -(-samples // batch))):
            total = jax.tree.map(np.add, total, got)
            yield total
