"""`check`: is the target's law preserved by this drafter and this rule? A verdict with an error rate and a power."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specjax import decode, plugins, verify
from specjax import drafter as drafters
from specjax.drafter import Drafter
from specjax.exactness import analysis, compatibility, identity, sampler, statistics, transform
from specjax.exactness.experiment import (
    BATCH,
    CONDITIONS,
    LATER,
    MIXED,
    SETTINGS,
    WIDE,
    Cases,
    Condition,
    Experiment,
    Setting,
)
from specjax.exactness.report import Case, Coverage, Report
from specjax.exactness.sampler import Tally
from specjax.exactness.statistics import EProcess, TestResult
from specjax.exactness.subjects import Subject, instances, llama_subject

SAMPLES = 1 << 20
ALPHA = 1e-3
DETECT = 0.03
SHARES = {"joint": 0.5, "conditional": 0.125, "independence": 0.125, "sequential": 0.125, "efficiency": 0.125}
"""Of the family's level; within a test, every hypothesis has an equal part."""
MIXED_PART = 0.9
"""Of the level, for the mixed batches: their tests are what the power is stated for."""
LATER_SHARES = {"transform": 0.2, "dependence": 0.05, "later": 0.25}
"""Beside the former, among the conditions."""
LATER_TEXTS = 1 << 11
"""Whose later tokens are tested."""

PROGRAM_S, SEQUENCES_PER_S = 7, 80_000
PREDICTION = (
    f"{PROGRAM_S} s a program compiled and {SEQUENCES_PER_S:,} sequences a second, as measured for our own drafters "
    "on 2 CPU cores"
)

Progress = Callable[[str, int], None]
"""Told what is being done, and how many more sequences were decoded."""


def silent(what: str, count: int) -> None:
    """No progress is shown."""


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
    conditions: Sequence[Condition] = CONDITIONS,
    progress: Progress = silent,
) -> Report:
    """Test whether decoding with `drafter` and `rule` keeps the target's law.

    Args:
      drafter: an instance, a name or `./file.py:Class`; by default the chosen instances' own.
      target: `table`, `llama`, a `Subject`, or `auto` (the table, unless the drafter needs a Llama).
      settings: sampling settings, mixed in every batch; by default, the conditions have `WIDE`.
      samples: sequences in mixed batches; the conditions add to them.
      alpha: chance of a false alarm over the whole family of tests.
      detect: total variation that must be caught with 99 % probability; else nothing better than
        INCONCLUSIVE is returned.
      conditions: further ways to batch, and lengths of texts; with none, later tokens aren't tested either.

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
    experiments += under(experiments[0], conditions)
    return run(experiments, samples, alpha, detect, seed, progress, later=LATER_TEXTS if conditions else 0)


def under(experiment: Experiment, conditions: Sequence[Condition] = CONDITIONS) -> list[Experiment]:
    """The same under other conditions; with `WIDE` settings, unless its own were chosen."""
    wide = WIDE if experiment.settings is SETTINGS else experiment.settings
    return [dataclasses.replace(experiment, settings=wide, condition=condition) for condition in conditions]


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
    conditions: Sequence[Condition] = CONDITIONS,
) -> Report:
    """For a test suite: fail unless `check` passes.

    Raises:
      AssertionError: with the whole report.
    """
    report = check(
        drafter, rule=rule, target=target, settings=settings, samples=samples, alpha=alpha, detect=detect, seed=seed,
        conditions=conditions,
    )  # fmt: skip
    assert report.passed, f"\n{report}"
    return report


def sequences(samples: int, drafters: int) -> int:
    """How many `check` decodes in all: conditions add to what is asked for."""
    return samples + math.ceil(samples / drafters * sum(c.share for c in CONDITIONS)) + LATER_TEXTS


def predicted_seconds(samples: int, drafters: int) -> float:
    """How long `check` takes, by `PREDICTION`."""
    return PROGRAM_S * (drafters + len(CONDITIONS) + 1) + sequences(samples, drafters) / SEQUENCES_PER_S


def _subjects(drafter: Drafter | None, target: Subject | str) -> Sequence[tuple[Subject, Drafter]]:
    if isinstance(target, Subject):
        return [(target, drafter or drafters.Nothing())]
    if target not in ("auto", "table", "llama"):
        raise ValueError(
            f"target={target!r}: must be auto, table or llama, or a Subject; a checkpoint's law can't be enumerated, "
            "use specjax.exactness.check_large for it"
        )
    if drafter is None:
        if target == "llama":
            return [(llama_subject(), plugins.load_drafter("early-exit", {"exit_layer": "1"}))]
        return [*instances(3), *instances(2)]
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
    progress: Progress = silent,
    later: int = 0,
) -> Report:
    """Sample every experiment, test the counts and put the verdict together.

    The mixed batches have `MIXED_PART` of the level and give the power; the other conditions share the rest.

    Args:
      samples: sequences of the mixed batches in all.
      later: texts of the first experiment whose later tokens are tested, too.
    """
    began, program = time.perf_counter(), experiments[0].program
    mixed = [e for e in experiments if e.condition == MIXED]
    least = 200 * sum(len(e.names) for e in mixed)
    if samples < least:
        raise ValueError(f"samples={samples}: too few for any test of these settings; ask for at least {least:,}")
    found = []
    for number, experiment in enumerate(experiments):
        share = math.ceil(samples / len(mixed) * experiment.condition.share)
        found.append(gather(experiment, max(share, 200 * len(experiment.names)), seed + number, progress))
    progress("the rule's own law, by enumeration", 0)
    gate, identities = identity.check_rule(program.rule)
    part = MIXED_PART if later or len(mixed) < len(experiments) else 1.0
    main, rest = ([e for e in found if (e.experiment.condition == MIXED) is kind] for kind in (True, False))
    results = adjust([r for evidence in main for r in evidence.results()], part=part)
    others = [r for evidence in rest for r in evidence.results()]
    results += [r for evidence in found for r in identity.replay_results(evidence.tally.replays(), evidence.place)]

    level = part * alpha * SHARES["joint"] / sum(len(e.joints) for e in mixed)
    small = (1 - part) * alpha * SHARES["joint"] / max(sum(len(e.experiment.joints) for e in rest), 1)
    cases = [case for evidence in main for case in evidence.cases(level)]
    coverage = [evidence.coverage(evidence.cases(level)) for evidence in main]
    coverage += [evidence.coverage(evidence.cases(small)) for evidence in rest]
    if later:
        progress(LATER.name, 0)
        tests, replays, covered = transform.later_tokens(experiments[0], later, seed, (1 - part) * alpha)
        progress(LATER.name, later)
        others, results, coverage = others + tests, results + replays, [*coverage, covered]
    results += adjust(others, SHARES | LATER_SHARES, part=1 - part) + list(identities)

    joints = [joint for e in mixed for joint in e.joints]
    pairs, total = list(zip(cases, joints, strict=True)), sum(case.counts.sum() for case in cases)
    worst = max(case.detectable for case in cases)
    needed = (statistics.samples_needed(detect, j.cells, level) * total / c.counts.sum() for c, j in pairs)
    rejected = any(result.adjusted <= alpha for result in results)
    approximate = compatibility.is_approximate(program.rule)
    everything = pairs + [p for e in rest for p in zip(e.cases(small), e.experiment.joints, strict=True)]
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
        deviations=analysis.explain(results, everything, alpha) if rejected else (),
        divergences=tuple(analysis.divergence(*pair) for pair in pairs) if approximate else (),
        seconds=time.perf_counter() - began,
        coverage=tuple(coverage),
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

    @property
    def place(self) -> str:
        """What its tests are called by, where it is not a mixed batch."""
        return "" if self.experiment.condition == MIXED else f"{self.experiment.condition.name}: "

    def coverage(self, cases: Sequence[Case]) -> Coverage:
        """What was decoded."""
        experiment = self.experiment
        prompts = [len(prompt) for context in experiment.contexts for prompt in context]
        return Coverage(
            experiment.condition.name,
            experiment.condition.rows or BATCH,
            (min(prompts) + experiment.length, max(prompts) + experiment.length),
            tuple(map(str, experiment.settings)),
            tuple(int(rounds) for rounds in np.asarray(self.tally.drafted).sum(0)),
            int(sum(case.counts.sum() for case in cases)),
            max(case.detectable for case in cases),
        )

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
    progress: Progress = silent,
    *,
    batch: int = BATCH,
    cases: Cases | None = None,
) -> Evidence:
    """Sample an experiment; the sequential test watches after every batch."""
    copies = cases.count // len(experiment.joints) if cases else 1
    what = f"{experiment.subject.name}, {experiment.condition.name}"
    progress(what, 0)
    bets = [EProcess(np.append(joint.cells, 0.0)) for joint in experiment.joints * copies]
    for tally in sampler.sample(experiment, samples, seed, batch=batch, cases=cases):
        for bet, counts in zip(bets, tally.cells, strict=True):
            bet.update(np.asarray(counts))
        progress(what, len(cases.case) if cases else batch)
    return Evidence(experiment, tally, bets)


def adjust(
    results: Sequence[TestResult], shares: dict[str, float] | None = None, part: float = 1.0
) -> list[TestResult]:
    """Correct a family of p-values by the weighted Holm method; `part` of the level is its own (Bonferroni)."""
    shares = shares or SHARES
    sizes = {name: sum(result.test == name for result in results) for name in shares}
    weights = [shares[result.test] / sizes[result.test] for result in results]
    adjusted = statistics.holm([result.p_value for result in results], weights)
    return [dataclasses.replace(r, adjusted=min(a / part, 1.0)) for r, a in zip(results, adjusted, strict=True)]
