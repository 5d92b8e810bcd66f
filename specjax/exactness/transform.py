"""Texts whose laws can't be enumerated: every emitted token under the target's own law.

A token x drawn from p, with the ids in any order that is fixed beforehand, gives F(x-) + v p(x) with v
uniform: uniform on [0, 1] and independent of the past (Rosenblatt 1952). The order here is log q - log p
of the round's draft: an acceptance or residual fault favours what the drafter favours and moves mass
along it. p comes from a pass of its own over committed tokens only, in a cache that no draft has touched.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from scipy.stats import chi2

from specjax import decode, sampling
from specjax.exactness import identity, sampler, statistics
from specjax.exactness.experiment import LATER, SETTINGS, WIDE, Experiment, make_cases
from specjax.exactness.oracle import laws_at
from specjax.exactness.report import Coverage
from specjax.exactness.statistics import TestResult, certain
from specjax.types import Model, Params, Sampling

BINS, PAIR_BINS = 16, 5
NEW_TOKENS = 40
Replay = tuple[Array, Array, Array, Array]


def observe(
    program: decode.Program, params: Params, own: Params, state: decode.State, new_tokens: int, noise: Key[Array, ""]
) -> tuple[np.ndarray, decode.State, Replay]:
    """Decode to the end under watch.

    Returns:
      transformed values [rows, new_tokens], NaN where no round emitted; the last state; each round's drafts drawn
      again (`sampler.compare_drafts`), summed over rounds.
    """
    first_new = state.limit - new_tokens
    window = first_new[:, None] + jnp.arange(new_tokens, dtype=jnp.int32)[None]
    state, drafted, replay = watch(program, params, own, state, first_new, new_tokens)
    values = np.array(
        transform(program.model, params, state.tokens, window, drafted, state.sampling, noise), np.float64
    )
    values[:, 0] = np.nan  # emitted by the prompt's own pass
    return values, state, replay


@functools.partial(jax.jit, static_argnames=("program", "new_tokens"))
def watch(
    program: decode.Program, params: Params, own: Params, state: decode.State, first: Int[Array, "B"], new_tokens: int
) -> tuple[decode.State, Array, Replay]:
    """Decode to the end, and note what was drafted for each new token.

    Returns:
      the last state; for each token the law of its draft [B, N, V], zeros where it had none, or for point
      masses their ids [B, N], -1 where there was none (a tree gives no order: it counts as none); and each
      round's drafts, drawn again.
    """
    outline = jax.eval_shape(functools.partial(decode.propose, program, params, own), state)
    rows = jnp.arange(state.tokens.shape[0], dtype=jnp.int32)[:, None]
    steps = jnp.arange(outline.tokens.shape[1], dtype=jnp.int32)[None]
    shape = (len(rows), new_tokens)
    blank = jnp.full(shape, -1, jnp.int32)
    if outline.log_q is not None and outline.parents is None:
        blank = jnp.zeros((*shape, outline.log_q.shape[-1]), jnp.float32)

    def body(carry: Any) -> Any:
        state, drafted, replay = carry
        draft = decode.propose(program, params, own, state)
        if draft.log_q is not None and draft.tokens.shape[1]:
            active = (~state.done[:, None]).astype(jnp.float32)
            again = sampler.compare_drafts(draft, state)
            replay = jax.tree.map(lambda total, now: total + now * active, replay, again)
        after = decode.verify_and_commit(program, params, own, state, draft)
        if draft.parents is not None:
            return after, drafted, replay
        emitted = state.length[:, None] + steps < after.length[:, None]
        index = jnp.where(emitted, state.length[:, None] + steps - first[:, None], new_tokens)
        kept = draft.tokens if draft.log_q is None else draft.log_q
        return after, drafted.at[rows, index].set(kept, mode="drop"), replay

    nothing = (jnp.zeros(outline.tokens.shape, jnp.float32),) * 4
    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body, (state, blank, nothing))


@functools.partial(jax.jit, static_argnames=("model",))
def transform(
    model: Model, params: Params, tokens: Int[Array, "B T"], window: Int[Array, "B N"], drafted: Array,
    filters: Sampling, noise: Key[Array, ""],
) -> Float[Array, "B N"]:  # fmt: skip
    """The transform of the tokens at `window`, under the target's laws from one pass over the finished text."""
    cache = model.init_cache(tokens.shape[0], tokens.shape[1], jnp.float32)
    hidden = model.forward(params, tokens, cache, jnp.zeros(tokens.shape[:1], jnp.int32)).hidden
    hidden = jnp.take_along_axis(hidden, window[..., None] - 1, 1)
    token = jnp.take_along_axis(tokens, window, 1)
    v = jax.random.uniform(noise, window.shape)
    ids = jnp.arange(model.vocab_size, dtype=jnp.int32)[None]

    def one(column: Any) -> Float[Array, "B"]:
        hidden, token, drafted, v = column
        logits = model.logits(params, hidden[:, None])[..., : model.vocab_size]
        log_p = sampling.log_probs(logits, filters)[:, 0]
        log_q = drafted if drafted.ndim == 2 else jnp.where(ids == drafted[:, None], 0.0, -1e9)
        score = jnp.where(log_p > -jnp.inf, jnp.maximum(log_q, -1e9) - jnp.maximum(log_p, -1e9), -jnp.inf)
        p, here = jnp.exp(log_p), ids == token[:, None]
        mine, mass = jnp.take_along_axis(score, token[:, None], 1), jnp.sum(jnp.where(here, p, 0), -1)
        below = (score < mine) | ((score == mine) & (ids < token[:, None]))
        # a token of probability 0 has no place in the order: it counts as the largest
        value = jnp.sum(jnp.where(below, p, 0), -1) + v * mass
        return jnp.where(mass > 0, jnp.clip(value, 0, 1 - 1e-7), 1 - 1e-7)

    columns = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (hidden, token, drafted, v))
    return jnp.swapaxes(jax.lax.map(one, columns), 0, 1)


def transform_tests(values: np.ndarray, where: str = "") -> list[TestResult]:
    """Uniformity of all values, and of neighbouring pairs jointly."""
    results = []
    parts = {"all tokens of rounds": values, "tokens 1 to 4": values[:, 1:5], "later tokens": values[:, 5:]}
    parts = {where + name: part for name, part in parts.items()}
    for name, part in parts.items():
        counts = np.histogram(part[np.isfinite(part)], BINS, (0, 1))[0].astype(float)
        if counts.sum() > 0 or part is values:
            results.append(TestResult("transform", name, *statistics.g_test(counts, np.full(BINS, 1 / BINS))))
    left, right = values[:, 1:-1].ravel(), values[:, 2:].ravel()
    both = np.isfinite(left) & np.isfinite(right)
    table = np.histogram2d(left[both], right[both], PAIR_BINS, ((0, 1), (0, 1)))[0]
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / max(table.sum(), 1)
    statistic = float(np.sum((table - expected) ** 2 / np.maximum(expected, 1e-9)))
    degrees = (PAIR_BINS - 1) ** 2
    p_value = float(chi2.sf(statistic, degrees))
    return [*results, TestResult("dependence", f"{where}neighbouring tokens", statistic, degrees, p_value)]


def later_tests(tokens: np.ndarray, window: np.ndarray, laws: np.ndarray) -> list[TestResult]:
    """Each token against its own law, given the two before it: a sum of martingale differences, so about normal.

    For small vocabularies. It needs no order of the ids, and sees a fault that the transform's order hides.
    """
    rows, vocab = np.arange(len(tokens))[:, None], laws.shape[-1]
    new = tokens[rows, window]
    before = np.ravel(tokens[rows, window - 2] * vocab + tokens[rows, window - 1])
    law = np.asarray(laws, np.float64).reshape(-1, vocab)
    law /= law.sum(-1, keepdims=True)
    difference = np.eye(vocab)[new.ravel()] - law
    lost = float((law[np.arange(len(law)), new.ravel()] == 0).sum())
    results = [certain("later", f"{lost:.0f} tokens of probability 0", lost, lost == 0)]
    for context in np.unique(before):
        here = before == context
        total = difference[here].sum(0)
        variance = np.diag(law[here].sum(0)) - law[here].T @ law[here]
        degrees = int(np.linalg.matrix_rank(variance, hermitian=True, tol=1e-6 * here.sum()))
        statistic = float(total @ np.linalg.pinv(variance, rcond=1e-6, hermitian=True) @ total)
        p_value = float(chi2.sf(statistic, degrees)) if degrees else 1.0
        place = f"tokens after {divmod(int(context), vocab)}"
        results.append(TestResult("later", place, statistic, degrees, p_value))
    return results


def later_tokens(
    experiment: Experiment, texts: int, seed: int, alpha: float
) -> tuple[list[TestResult], list[TestResult], Coverage]:
    """Tests of tokens far behind the prompt, each setting on its own; of the drafts' replay, in every round."""
    settings = WIDE if experiment.settings is SETTINGS else experiment.settings
    experiment = replace(experiment, settings=settings, condition=LATER)
    cases = make_cases(replace(experiment, new_tokens=NEW_TOKENS), texts)
    program, subject = experiment.program, experiment.subject
    own = program.drafter.params(jax.random.key(experiment.drafter_seed), subject.model, subject.params)
    key = jax.random.fold_in(jax.random.key(seed), 1 << 20)
    prompts = replace(cases.prompts, keys=jax.random.split(key, texts))
    state = decode.start(program, subject.params, own, prompts, jnp.float32)
    values, state, replay = observe(program, subject.params, own, state, NEW_TOKENS, key)
    tests: list[TestResult] = []
    sizes = []
    for number, setting in enumerate(experiment.settings):
        rows = cases.case % len(experiment.settings) == number
        tests += transform_tests(values[rows], f"{setting}, later tokens: ")
        sizes.append(np.isfinite(values[rows]).sum())
    window = prompts.length[:, None] + jnp.arange(NEW_TOKENS, dtype=jnp.int32)[None]
    laws = laws_at(subject.model, subject.params, state.tokens, window, prompts.sampling)
    tests += later_tests(*map(np.asarray, (state.tokens, window, laws)))
    level, drafted = alpha / (4 * len(sizes)), np.asarray(state.counts.drafted)
    rounds = np.bincount(drafted[np.asarray(state.counts.emitted) > 0], minlength=1)
    length = np.asarray(prompts.length)
    return tests, identity.replay_results(replay, "later rounds: "), Coverage(
        LATER.name, texts, (int(length.min()) + NEW_TOKENS, int(length.max()) + NEW_TOKENS),
        tuple(map(str, experiment.settings)), tuple(map(int, rounds)), texts,
        statistics.detectable(min(sizes), np.full(BINS, 1 / BINS), level),
    )  # fmt: skip
