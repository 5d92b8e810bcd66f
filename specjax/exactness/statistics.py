"""Tests of counts against an exact law, each with a size that is known before the data are seen.

`joint_test` sees every deviation of the joint law and has a guaranteed power; `conditional_tests` say in
which context it lies; `independence_tests` look at pairs of positions; `EProcess` may be watched and
stopped at any moment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import chi2, ncx2, norm

from specjax.exactness.oracle import Joint

POOL_BELOW = 10.0
"""Cells that expect fewer counts are pooled. Decided by the law and the sample size alone, before any data."""

CONDITIONAL_BELOW = 25.0
CONDITIONAL_DEPTH = 3
POWER = 0.99
MARGIN = 1.03
"""On the noncentrality: with ten expected counts a cell, its chi-square law promises half a percent too much."""


@dataclass(frozen=True)
class TestResult:
    """One hypothesis tested."""

    test: str
    where: str
    statistic: float
    degrees: int
    p_value: float
    adjusted: float = 1.0  # after correction over the whole family


def certain(test: str, where: str, statistic: float, holds: bool) -> TestResult:
    """Of a check without chance: it holds or not, in whatever family."""
    return TestResult(test, where, statistic, 0, float(holds), float(holds))


def pools(expected: np.ndarray, least: float = POOL_BELOW) -> np.ndarray:
    """The pool of each cell; -1 for impossible ones. Small cells are joined, the smallest first."""
    labels = np.full(expected.shape, -1, np.int64)
    possible = np.flatnonzero(expected > 0)
    large = possible[expected[possible] >= least]
    labels[large] = np.arange(len(large))
    small = possible[expected[possible] < least]
    small = small[np.argsort(expected[small], kind="stable")]
    label, mass = len(large), 0.0
    for cell in small:
        labels[cell] = label
        mass += expected[cell]
        if mass >= least:
            label, mass = label + 1, 0.0
    if mass > 0 and label > 0:  # the rest joins the last pool
        labels[labels == label] = label - 1
    return labels


def pooled(counts: np.ndarray, law: np.ndarray, least: float = POOL_BELOW) -> tuple[np.ndarray, np.ndarray]:
    """Observed and expected counts of each pool; impossible cells are left out."""
    expected = law * counts.sum()
    labels = pools(expected, least)
    kept = labels >= 0
    size = int(labels.max(initial=-1)) + 1
    return (
        np.bincount(labels[kept], counts[kept], minlength=size),
        np.bincount(labels[kept], expected[kept], minlength=size),
    )


def g_test(counts: np.ndarray, law: np.ndarray, least: float = POOL_BELOW) -> tuple[float, int, float]:
    """Likelihood-ratio test with Williams' correction (Biometrika 63, 1976): statistic, degrees, p-value.

    Anything seen where the law has no mass is a proof, not evidence: p = 0.
    """
    if np.any(counts[law == 0] > 0):
        return math.inf, int(np.sum(law > 0)) - 1, 0.0
    observed, expected = pooled(counts, law, least)
    degrees = len(expected) - 1
    if degrees < 1:
        return 0.0, 0, 1.0
    ratio = np.where(observed > 0, observed, 1) / np.where(observed > 0, expected, 1)
    statistic = 2 * float(np.sum(observed * np.log(ratio)))
    williams = 1 + (np.sum(1 / expected) - 1 / counts.sum()) / (6 * degrees)
    statistic = max(0.0, statistic / williams)
    return statistic, degrees, float(chi2.sf(statistic, degrees))


def joint_test(counts: np.ndarray, joint: Joint, where: str) -> TestResult:
    """All tokens together."""
    return TestResult("joint", where, *g_test(counts, joint.cells))


def conditional_tests(counts: np.ndarray, joint: Joint, where: str) -> list[TestResult]:
    """The law of each token given all before it, one test a context that is expected often enough.

    Contexts are chosen by the law, so the number of tests is fixed before the data; their p-values are
    corrected by Holm's method with the rest of the family.
    """
    total, results, reach = counts.sum(), [], np.ones(1)
    for depth, seen in enumerate(joint.seen(counts)[: CONDITIONAL_DEPTH + 1]):
        for context in np.flatnonzero(reach > 0):
            law = joint.steps[depth][context]
            if reach[context] * total * np.sort(law)[-2] < CONDITIONAL_BELOW:
                continue
            place = f"{where}, position {depth} after {joint.tokens(int(context), depth)}"
            results.append(TestResult("conditional", place, *g_test(seen[context], law, CONDITIONAL_BELOW)))
        reach = (reach[:, None] * joint.steps[depth]).reshape(-1)
    return results


def independence_tests(counts: np.ndarray, joint: Joint, where: str) -> list[TestResult]:
    """Correlation between positions of what the context does not explain.

    Each token is turned into its mid-rank under its own conditional law (tokens ordered by probability),
    less its expectation. Under the null these are martingale differences, hence uncorrelated, and the
    variance of each product is known from the enumeration.
    """
    scores = []
    for t, step in enumerate(joint.steps):
        below = step[:, None, :] < step[:, :, None]
        tied = step[:, None, :] == step[:, :, None]
        rank = (step[:, None, :] * (below + 0.5 * tied)).sum(-1) - 0.5
        scores.append(np.repeat(rank.reshape(-1), joint.vocab ** (joint.length - t - 1)))
    law, total, results = joint.cells, counts.sum(), []
    for first in range(joint.length):
        for second in range(first + 1, joint.length):
            product = scores[first] * scores[second]
            variance = float(np.sum(law * product**2))
            if variance * total < CONDITIONAL_BELOW * 1e-3:
                continue
            z = float(np.sum(counts * product)) / math.sqrt(variance * total)
            place = f"{where}, positions {first} and {second}"
            results.append(TestResult("independence", place, z, 1, float(2 * norm.sf(abs(z)))))
    return results


class EProcess:
    """A betting test that may be stopped at any moment: P(it ever exceeds 1 / alpha) <= alpha under the law.

    The bet is a Dirichlet mixture around the null with mass `k / 2` (Ville's inequality; Shafer 2021,
    J. R. Stat. Soc. A 184). Its price is a sample three to five times that of the fixed-size test.
    """

    def __init__(self, law: np.ndarray):
        self.possible = law > 0
        self.law = law[self.possible]
        self.prior = self.law * len(self.law) / 2
        self.log_e = self.largest = 0.0

    def update(self, total_counts: np.ndarray) -> float:
        """Wealth (log) after the counts seen so far, all of them."""
        counts = total_counts[self.possible]
        if total_counts.sum() > counts.sum():
            self.log_e = math.inf
        else:
            bet = gammaln(self.prior.sum()) - gammaln(self.prior.sum() + counts.sum())
            bet += np.sum(gammaln(self.prior + counts) - gammaln(self.prior))
            self.log_e = float(bet - np.sum(counts * np.log(self.law)))
        self.largest = max(self.largest, self.log_e)
        return self.log_e

    @property
    def p_value(self) -> float:
        """Valid at any time: one over the largest wealth so far."""
        return math.exp(-max(0.0, self.largest)) if math.isfinite(self.largest) else 0.0


def noncentrality(degrees: int, alpha: float, power: float = POWER) -> float:
    """Of a chi-square that its test of size `alpha` rejects with probability `power`."""
    critical = chi2.isf(alpha, degrees)
    return float(brentq(lambda value: ncx2.sf(critical, degrees, value) - power, 1e-6, 1e6))


def detectable(samples: float, law: np.ndarray, alpha: float, power: float = POWER) -> float:
    """Smallest total variation that `joint_test` catches with probability `power`, wherever the deviation lies.

    For d = observed law - law, N sum d^2 / p >= 4 N TV^2 by Cauchy and Schwarz, with equality for a
    deviation spread in proportion to p: that is the worst case. TV is that of the pooled law.
    """
    _, expected = pooled(law * samples, law)
    if len(expected) < 2:
        return min(1.0, -math.log(1 - power) / samples)
    return min(1.0, math.sqrt(MARGIN * noncentrality(len(expected) - 1, alpha, power) / (4 * samples)))


def samples_needed(deviation: float, law: np.ndarray, alpha: float, power: float = POWER) -> int:
    """Sequences after which `detectable` falls to `deviation`."""
    samples = 1000.0
    while detectable(samples, law, alpha, power) > deviation:
        samples *= 1.05
    return math.ceil(samples)


def holm(p_values: list[float], weights: list[float]) -> list[float]:
    """Adjusted p-values of a family under the weighted Holm method (Holm 1979, section 4).

    A hypothesis is rejected at family-wise level alpha iff its adjusted value is at most alpha.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i] / weights[i])
    adjusted, remaining, largest = [1.0] * len(p_values), math.fsum(weights), 0.0
    for i in order:
        largest = max(largest, min(1.0, p_values[i] * remaining / weights[i]))
        adjusted[i] = largest
        remaining = max(remaining - weights[i], weights[i] * 1e-12)
    return adjusted
