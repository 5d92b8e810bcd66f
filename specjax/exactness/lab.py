"""`check`: is the target's law preserved by this drafter and this rule? A verdict with an error rate and a power."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specjax import decode, plugins, verify
from specjax import drafter as drafters
from specjax.drafter import Drafter
from specjax.exactness import analysis, compatibility, identity, sampler, statistics
from specjax.exactness.experiment import BATCH, SETTINGS, Cases, Experiment, Setting
from specjax.exactness.report import Case, Report
from specjax.exactness.sampler import Tally
from specjax.exactness.statistics import EProcess, TestResult
from specjax.exactness.subjects import Subject, instances, llama_subject

SAMPLES = 1 << 20
ALPHA = 1e-3
DETECT = 0.03
SHARES = {"joint": 0.5, "conditional": 0.125, "independence": 0.125, "sequential": 0.125, "efficiency": 0.125}
"""Of the family's level; within a test, every hypothesis has an equal part."""


def check(
    drafter: Drafter | str | None = None,
    *,
    rule: verify.Rule | None = None,
    target: Subject | str = "auto",
    settings: Sequence[Setting] = SETTINGS,
    samples: int = SAMPLES,
    alpha: float = ALPHA,
    detect: float = DETECT,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Test whether decoding with `drafter` and `rule` keeps the target's law.

    Args:
      drafter: an instance, a name or `./file.py:Class`; by default the chosen instances' own.
      target: `table`, `llama`, a `Subject`, or `auto` (the table, unless the drafter needs a Llama).
      settings: sampling settings, mixed in every batch.
      samples: sequences in all.
      alpha: chance of a false alarm over the whole family of tests.
      detect: total variation that must be caught with 99 % probability; else nothing better than
        INCONCLUSIVE is returned.

    Raises:
      ValueError: a level, deviation or number out of range; a rule and drafter that don't fit.
      NotEnumerableError: a target with too many cells.
    """
    rule = rule or verify.Token()
    if not 0 < alpha < 1 or not 0 < detect < 1:
        raise ValueError(f"alpha={alpha}, detect={detect}: both must lie strictly between 0 and 1")
    if not settings:
        raise ValueError("no sampling settings: give at least one")
    drafter = plugins.load_drafter(drafter) if isinstance(drafter, str) else drafter
    experiments = [Experiment(decode.Program(s.model, d, rule), s, settings) for s, d in _subjects(drafter, target)]
    for experiment in experiments:
        compatibility.check_fit(experiment.program, experiment.subject)
    return run(experiments, samples, alpha, detect, seed, progress)


def assert_exact(
    drafter: Drafter | str | None = None,
    *,
    rule: verify.Rule | None = None,
    target: Subject | str = "auto",
    settings: Sequence[Setting] = SETTINGS,
    samples: int = SAMPLES,
    alpha: float = ALPHA,
    detect: float = DETECT,
    seed: int = 0,
) -> Report:
    """For a test suite: fail unless `check` passes.

    Raises:
      AssertionError: with the whole report.
    """
    report = check(
        drafter, rule=rule, target=target, settings=settings, samples=samples, alpha=alpha, detect=detect, seed=seed
    )
    assert report.passed, f"\n{report}"
    return report


def _subjects(drafter: Drafter | None, target: Subject | str) -> list[tuple[Subject, Drafter]]:
    if isinstance(target, Subject):
        return [(target, drafter or drafters.Nothing())]
    if target not in ("auto", "table", "llama"):
        raise ValueError(
            f"target={target!r}: must be auto, table or llama, or a Subject; a checkpoint's law can't be enumerated, "
            "use specjax.exactness.check_large for it"
        )
    if drafter is None:
        return [*instances(3), *instances(2)] if target != "llama" else [(llama_subject(), drafters.Nothing())]
    table = instances(max(1, drafter.num_speculative_tokens))[0][0]
    if target == "llama" or (target == "auto" and not compatibility.can_draft(drafter, table)):
        return [(llama_subject(), drafter)]
    return [(table, drafter)]


def run(
    experiments: Sequence[Experiment],
    samples: int,
    alpha: float,
    detect: float,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Sample every experiment, test the counts and put the verdict together."""
    began, program = time.perf_counter(), experiments[0].program
    share = -(-samples // len(experiments))
    least = 200 * sum(len(e.names) for e in experiments)
    if samples < least:
        raise ValueError(f"samples={samples}: too few for any test of these settings; ask for at least {least:,}")
    found = [gather(e, share, seed + i, progress) for i, e in enumerate(experiments)]
    progress("enumerating the rule's own law")
    gate, identities = identity.check_rule(program.rule)
    results = [*adjust([r for part in found for r in part.results()]), *identities]
    results += [r for part in found for r in identity.replay_results(part.tally)]

    joints = [joint for e in experiments for joint in e.joints]
    level = alpha * SHARES["joint"] / len(joints)
    cases = [case for part in found for case in part.cases(level)]
    pairs, total = list(zip(cases, joints, strict=True)), sum(case.counts.sum() for case in cases)
    worst = max(case.detectable for case in cases)
    needed = (statistics.samples_needed(detect, j.cells, level) * total / c.counts.sum() for c, j in pairs)
    rejected = any(result.adjusted <= alpha for result in results)
    approximate = compatibility.is_approximate(program.rule)
    return Report(
        subject=", ".join(dict.fromkeys(e.subject.name for e in experiments)),
        drafter=", ".join(dict.fromkeys(str(e.program.drafter) for e in experiments)),
        rule=str(program.rule),
        proven=program.exact,
        approximate=approximate,
        settings=tuple(map(str, experiments[0].settings)),
        samples=int(total),
        tokens=max(e.length for e in experiments),
        alpha=alpha,
        detect=detect,
        detectable=worst,
        needed=max(map(int, needed)) + 1 if worst > detect else 0,
        results=tuple(results),
        gate=gate,
        cases=tuple(cases),
        deviations=analysis.explain(results, pairs, alpha) if rejected else (),
        divergences=tuple(analysis.divergence(*pair) for pair in pairs) if approximate else (),
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class Evidence:
    """Counts of an experiment. In a panel its cases come once for each mutant: in parts."""

    experiment: Experiment
    tally: Tally
    bets: list[EProcess]

    def cases_of(self, part: int = 0) -> slice:
        """Their numbers."""
        size = len(self.experiment.joints)
        return slice(part * size, (part + 1) * size)

    def cases(self, level: float) -> list[Case]:
        """Of the first part, with what a joint test at this level detects."""
        rows = enumerate(zip(self.experiment.names, self.experiment.joints, self.tally.cells, strict=True))
        return [
            Case(
                name, joint.cells, np.asarray(counts), statistics.detectable(counts.sum(), joint.cells, level),
                self.tally.mean_accepted(index),
            )
            for index, (name, joint, counts) in rows
        ]  # fmt: skip

    def results(self, part: int = 0) -> list[TestResult]:
        """Every test, not yet corrected. Sequences outside of every cell fail the joint test by themselves."""
        results: list[TestResult] = []
        experiment, numbers = self.experiment, range(len(self.bets))[self.cases_of(part)]
        for index, name, joint in zip(numbers, experiment.names, experiment.joints, strict=True):
            cells = np.asarray(self.tally.cells[index])
            counts, lost, bet = cells[:-1], cells[-1], self.bets[index]
            where = f"{experiment.subject.name}, {name}"
            first = statistics.joint_test(counts, joint, where)
            if lost > 0:
                place = f"{where}: {int(lost)} sequences with an id of probability 0, or cut"
                first = TestResult("joint", place, np.inf, 0, 0.0)
            results += [first, TestResult("sequential", where, bet.largest, 0, bet.p_value)]
            results += statistics.conditional_tests(counts, joint, where)
            results += statistics.independence_tests(counts, joint, where)
            results += identity.efficiency(self.tally, index, where)
        return results


def gather(
    experiment: Experiment,
    samples: int,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
    *,
    batch: int = BATCH,
    cases: Cases | None = None,
) -> Evidence:
    """Sample an experiment; the sequential test watches after every batch."""
    copies = cases.count // len(experiment.joints) if cases else 1
    bets = [EProcess(np.append(joint.cells, 0.0)) for joint in experiment.joints * copies]
    for tally in sampler.sample(experiment, samples, seed, batch=batch, cases=cases):
        for bet, counts in zip(bets, tally.cells, strict=True):
            bet.update(np.asarray(counts))
        progress(f"{experiment.subject.name}: {int(tally.cells.sum()):,} sequences")
    return Evidence(experiment, tally, bets)


def adjust(results: Sequence[TestResult], shares: dict[str, float] | None = None) -> list[TestResult]:
    """Correct a family of p-values by the weighted Holm method."""
    shares = shares or SHARES
    sizes = {name: sum(result.test == name for result in results) for name in shares}
    weights = [shares[result.test] / sizes[result.test] for result in results]
    adjusted = statistics.holm([result.p_value for result in results], weights)
    return [dataclasses.replace(r, adjusted=a) for r, a in zip(results, adjusted, strict=True)]
