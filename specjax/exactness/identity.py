"""Checks that need no statistics, or hardly any: the rule's law, the drafts' replay, the accepted counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm

from specjax import verify
from specjax.exactness import gate
from specjax.exactness.sampler import Tally
from specjax.exactness.statistics import TestResult, certain
from specjax.exactness.subjects import dirichlet_laws

REPLAY_TOLERANCE = 1e-5
"""Share of drafts that may not replay: two fusions of one program may round a law differently."""


def check_rule(rule: verify.Rule) -> tuple[dict[str, float], tuple[TestResult, ...]]:
    """The enumeration gate on a small grid: a chain of two over three ids, and siblings, with zeros in the laws.

    Nothing is returned for a rule that the gate can't run: the report says so, and samples alone speak.
    """
    return _check_rule(rule) if gate.applies(rule) else ({}, ())  # type: ignore[arg-type]  # hashable, by contract


@functools.lru_cache(maxsize=64)
def _check_rule(rule: Any) -> tuple[dict[str, float], tuple[TestResult, ...]]:
    differences, results = {}, []
    for dtype, tolerance in gate.TOLERANCE.items():
        found, refused = [], ""
        for p, proposal in grid():
            try:
                found.append(difference(rule, proposal, p, dtype))
            except verify.NotAChainError:
                refused = ", on chains only: it takes no trees"
        worst, counted = np.max(found, 0)
        differences[dtype] = float(worst)
        place = f"{dtype}, largest difference {worst:.1e}{refused}"
        results.append(certain("identity", place, worst, worst <= tolerance))
        place = f"{dtype}, mean accepted minus mean overlap {counted:.1e}{refused}"
        results.append(certain("identity", place, counted, counted <= tolerance))
    never = gate.accepts_impossible(rule)
    results.append(certain("identity", "a draft of probability 0 at u = 0", never, never == 0))
    return differences, tuple(results)


def grid() -> list[tuple[gate.Law, gate.Proposal]]:
    """Laws and drafts that every rule is enumerated on: zeros in p, siblings, and a q that is almost p."""
    target, draft = dirichlet_laws(3, 3, seed=7)
    sparse = {context: np.where(law == law.min(), 0, law) for context, law in target.items()}
    sparse = {context: law / law.sum() for context, law in sparse.items()}
    near = {context: 0.9995 * law + 0.0005 * np.array([1.0, 0.0, 0.0]) for context, law in target.items()}
    p, q = target.__getitem__, draft.__getitem__
    siblings = gate.Proposal((-1, -1), lambda above, elder: q(above))
    return [
        (p, gate.chain(2, q)),
        (sparse.__getitem__, gate.chain(2, q)),
        (p, gate.chain(2, near.__getitem__)),
        (p, siblings),
    ]


def difference(rule: verify.DecisionRule, proposal: gate.Proposal, p: gate.Law, dtype: str) -> tuple[float, float]:
    """Largest difference of a joint law from the target's, and that of the drafts accepted from the overlap."""
    vocab = len(p(()))
    law, accepted, overlap = gate.enumerate_round(rule, p, proposal, vocab, dtype)
    return float(np.abs(law - gate.target_joint(p, vocab, law.ndim)).max()), abs(accepted - overlap)


def replay_results(counts: Sequence[ArrayLike], where: str = "") -> list[TestResult]:
    """Whether each drafted token is what the round's key draws from the law reported for it.

    A drafter may draw with other noise; then agreement is a matter of chance, sum q^2, and nothing
    follows. Where agreement is far above it, the noise is the round's own, and every disagreement is a
    draw from another law. This sees a law drawn in bfloat16, which no affordable sample can.

    Args:
      counts: what `sampler.compare_drafts` returns, summed over rows or cases by this function.
    """
    results = []
    sums = (np.asarray(part, np.float64).sum(0) for part in counts)
    for position, (drawn, replayed, chance, spread) in enumerate(zip(*sums, strict=True)):
        if not -1 - 1e-4 * drawn <= spread <= drawn:  # of q^2 (1 - q^2) a draw: beyond rounding, some q is above 1
            place = f"{where}draft {position}: what is reported is no distribution"
            results.append(certain("replay", place, float(spread), False))
            continue
        own = drawn > 0 and replayed - chance > 8 * math.sqrt(max(spread, 0) + 1)
        missed = drawn - replayed
        place = f"{where}draft {position}: {int(missed):,} of {int(drawn):,} are not drawn from the law reported"
        if own:
            results.append(certain("replay", place, float(missed), missed <= REPLAY_TOLERANCE * drawn))
    return results


def efficiency(tally: Tally, index: int, where: str) -> list[TestResult]:
    """Accepted drafts against the overlap that a rule counts: their difference is a martingale.

    The overlap is sum min(p, q) over the drafts that were tested; for block verification, of the weighted p.
    """
    total, variance = float(tally.surplus[index]), float(tally.surplus_squared[index])
    accepted = float((tally.accepted[index] * np.arange(tally.accepted.shape[1])).sum())
    if variance < 1:
        p_value = 1.0 if abs(total) < 1e-3 * max(1.0, accepted) else 0.0
        return [TestResult("efficiency", f"{where}: nothing random", total, 1, p_value)]
    z = total / math.sqrt(variance)
    place = f"{where}: accepted minus overlap is {total / tally.cells[index].sum():+.4f} a sequence"
    return [TestResult("efficiency", place, z, 1, float(2 * norm.sf(abs(z))))]
