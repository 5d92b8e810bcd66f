"""What a failure points to, and how far an approximate rule is from the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.exactness.oracle import Joint
from specjax.exactness.report import Case, Deviation, Divergence
from specjax.exactness.statistics import TestResult

RESAMPLES = 200


def explain(
    results: Sequence[TestResult], cases: Sequence[tuple[Case, Joint]], alpha: float, most: int = 3
) -> tuple[Deviation, ...]:
    """The contexts that deviate most, first those of the earliest position."""
    rejected = [result for result in results if result.adjusted <= alpha]
    tests = {result.test for result in rejected}
    found = []
    for case, joint in cases:
        counts, lost = case.counts[:-1], case.counts[-1]
        if lost > 0:
            share = float(lost / case.counts.sum())
            found.append((share, Deviation(case.name, (), share, _guess(0, joint, True, tests))))
        if counts.sum() > 0 and {"joint", "conditional", "sequential"} & tests:
            found += _contexts(case, joint, counts, tests)
    for result in rejected:
        if result.test in _OTHER and len(found) < most:
            found.append((0.0, Deviation(f"{result.test}: {result.where}", (), 0.0, _OTHER[result.test])))
    found.sort(key=lambda item: -item[0])
    return tuple(deviation for _, deviation in found[:most])


def _contexts(case: Case, joint: Joint, counts: np.ndarray, tests: set[str]) -> list[tuple[float, Deviation]]:
    """The worst context of the first position that deviates clearly."""
    for depth, (seen, step) in enumerate(zip(joint.seen(counts), joint.steps, strict=True)):
        size = seen.sum(-1)
        with np.errstate(invalid="ignore", divide="ignore"):
            observed = np.where(size[:, None] > 0, seen / size[:, None], step)
            z = np.where(step > 0, np.abs(seen - size[:, None] * step) / np.sqrt(size[:, None] * step * (1 - step)), 0)
        impossible = (seen > 0) & (step == 0)
        score = np.nan_to_num(np.where(impossible, 1e3, z), posinf=1e3).max(-1)
        worst = int(np.argmax(score))
        if score[worst] > 5:
            context = joint.tokens(worst, depth)
            tv = float(0.5 * np.abs(observed[worst] - step[worst]).sum())
            tokens = tuple((i, float(observed[worst, i]), float(step[worst, i])) for i in range(joint.vocab))
            place = (
                f"{case.name}, position {depth} after {context} ({size[worst]:,.0f} of {counts.sum():,.0f} sequences)"
            )
            guess = _guess(depth, joint, bool(impossible[worst].any()), tests)
            return [(float(score[worst]), Deviation(place, tokens, tv, guess))]
    return []


_OTHER = {
    "replay": "a law reported that is not the one drawn from: another dtype, temperature or filter",
    "efficiency": "right tokens at a lower rate than sum min(p, q) (q not used), or counters that count other tokens",
    "later": "a fault that the first tokens don't show: one that needs a longer text, or more rounds",
    "transform": "mass moved along log q - log p: the acceptance test or the residual, in texts that are long enough",
    "identity": "an acceptance threshold or residual that is not min(1, p / q) and norm(max(p - q, 0)), or an "
    "overlap counted that is not sum min(r, q)",
}


def _guess(position: int, joint: Joint, impossible: bool, tests: set[str]) -> str:
    if "replay" in tests:
        return _OTHER["replay"]
    if impossible:
        return (
            "tokens that the target never emits: filters on one side only, an end id or the budget ignored, "
            "padding taken for a draft, ids of another vocabulary, p = 0 accepted"
        )
    if position == 0:
        return "a wrong first token: prefill, prompt padding, or rows that share random numbers"
    if position == 1:
        return (
            "the test of the first draft or its residual: redraw from p, residual of another form, a law reported "
            "that is not the one drawn from, noise used twice, an epsilon or lenience in the ratio"
        )
    return (
        "a fault that the first draft does not show: one uniform for all positions, the bonus token from the draft "
        "or another row, rows of p or q off by one, stale cache slots after a rejection, a wrong block residual"
    )


def divergence(case: Case, joint: Joint, seed: int = 0) -> Divergence:
    """TV and KL per token of what was observed from the target, with 95 % intervals by the bootstrap.

    TV is the mean over positions of the conditional TV in the contexts that occurred; KL is that of the
    joint law divided by its length (chain rule). The upward bias of a plug-in estimate is taken off by the
    bootstrap (Efron and Tibshirani 1993, section 10.6).
    """
    counts = case.counts[:-1]
    total = int(counts.sum())
    plug_in = _distances(counts, joint)
    generator = np.random.default_rng(seed)
    again = np.array([_distances(generator.multinomial(total, counts / total), joint) for _ in range(RESAMPLES)])
    estimate = np.maximum(2 * plug_in - again.mean(0), 0)
    low, high = 2 * plug_in - np.quantile(again, 0.975, axis=0), 2 * plug_in - np.quantile(again, 0.025, axis=0)
    intervals = [(float(e), max(0.0, float(a)), float(b)) for e, a, b in zip(estimate, low, high, strict=True)]
    return Divergence(case.name, *intervals)


def _distances(counts: np.ndarray, joint: Joint) -> np.ndarray:
    total, tv = counts.sum(), 0.0
    for seen, step in zip(joint.seen(counts), joint.steps, strict=True):
        tv += 0.5 * float(np.abs(seen - seen.sum(-1, keepdims=True) * step).sum()) / total
    law, seen = joint.cells, counts / total
    if np.any(seen[law == 0] > 0):
        return np.array([tv / joint.length, np.inf])
    kept = seen > 0
    kl = float(np.sum(seen[kept] * np.log(seen[kept] / law[kept])))
    return np.array([tv / joint.length, kl / joint.length])
