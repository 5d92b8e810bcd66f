"""`check`: is the target's law preserved by this drafter and this rule? A verdict with an error rate and a power."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from specjax import decode, plugins, verify
from specjax import drafter as drafters
from specjax.drafter import Drafter
from specjax.exactness import analysis, compatibility, identity, sampler, statistics
from specjax.exactness.oracle import Joint, check_enumerable, enumerate_joint
from specjax.exactness.report import APPROXIMATE, FAIL, INCONCLUSIVE, PASS, Case, Report
from specjax.exactness.sampler import Setting, Tally
from specjax.exactness.statistics import EProcess, Result
from specjax.exactness.subjects import Subject, instances, llama_subject

SETTINGS = (
    Setting(1.0, weight=3),
    Setting(0.7, top_p=0.8),
    Setting(1.0, top_k=2),
    Setting(1.0, min_p=0.1),
    Setting(0.0),
)
"""The default panel. Rows of all settings share a batch."""

SAMPLES = 1 << 20
ALPHA = 1e-3
DETECT = 0.03
SHARES = {"joint": 0.5, "conditional": 0.125, "independence": 0.125, "sequential": 0.125, "efficiency": 0.125}
"""Of the family's level; within a test, every hypothesis has an equal part."""


@dataclass(frozen=True)
class Experiment:
    """A program, the target whose law it must have, and what it is fed."""

    program: decode.Program
    subject: Subject
    drafter_seed: int = 0
    new_tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens a sequence: one of prefill, a whole window, and one of a later round, as far as cells allow."""
        if self.new_tokens:
            return self.new_tokens
        length = self.program.drafter.num_speculative_tokens + 3
        while self.subject.tokens**length > 2048 and length > 3:
            length -= 1
        return length


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
    experiments = [Experiment(decode.Program(s.model, d, rule), s) for s, d in _subjects(drafter, target)]
    for experiment in experiments:
        compatibility.check_fit(experiment.program, experiment.subject)
    return run(experiments, settings, samples, alpha, detect, seed, progress)


def assert_exact(drafter: Drafter | str | None = None, **options: object) -> Report:
    """For a test suite: fail unless `check` passes.

    Raises:
      AssertionError: with the whole report.
    """
    report = check(drafter, **options)  # type: ignore[arg-type]
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
    settings: Sequence[Setting],
    samples: int,
    alpha: float,
    detect: float,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Sample every experiment, test the counts and put the verdict together."""
    began = time.perf_counter()
    share = -(-samples // len(experiments))
    least = 200 * sum(len(e.subject.contexts) * len(settings) for e in experiments)
    if samples < least:
        raise ValueError(f"samples={samples}: too few for any test of these settings; ask for at least {least:,}")
    program = experiments[0].program
    found = [measure(e, settings, share, seed + i, progress) for i, e in enumerate(experiments)]
    progress("enumerating the rule's own law")
    gate, identities = identity.check_rule(program.rule)
    results = adjust([r for part in found for r in part[1]])
    results = [*results, *identities, *(r for part in found for r in identity.replay_results(part[2]))]

    pairs = [pair for part in found for pair in zip(part[0], part[3], strict=True)]
    cases, joints = [case for case, _ in pairs], [joint for _, joint in pairs]
    level = alpha * SHARES["joint"] / len(cases)
    sizes = [statistics.detectable(case.counts.sum(), joint.cells, level) for case, joint in pairs]
    worst = max(sizes)
    approximate = compatibility.is_approximate(program.rule)
    rejected = any(result.adjusted <= alpha for result in results)
    return Report(
        verdict=APPROXIMATE if approximate else FAIL if rejected else INCONCLUSIVE if worst > detect else PASS,
        subject=", ".join(dict.fromkeys(e.subject.name for e in experiments)),
        drafter=", ".join(dict.fromkeys(str(e.program.drafter) for e in experiments)),
        rule=str(program.rule),
        proven=program.exact,
        settings=tuple(map(str, settings)),
        samples=int(sum(case.counts.sum() for case in cases)),
        tokens=max(e.length for e in experiments),
        alpha=alpha,
        detect=detect,
        detectable=worst,
        needed=_needed(cases, joints, detect, level) if worst > detect else 0,
        results=tuple(results),
        gate=gate,
        cases=tuple(dataclasses.replace(c, detectable=size) for c, size in zip(cases, sizes, strict=True)),
        deviations=analysis.explain(results, pairs, alpha) if rejected else (),
        divergences=tuple(analysis.divergence(*pair) for pair in pairs) if approximate else (),
        seconds=time.perf_counter() - began,
    )


def measure(
    experiment: Experiment,
    settings: Sequence[Setting],
    samples: int,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Case], list[Result], Tally, list[Joint]]:
    """Counts of every case, and the results of every test, not yet corrected."""
    subject, program, length = experiment.subject, experiment.program, experiment.length
    check_enumerable(subject.tokens, length)
    joints = joint_laws(subject, settings, length)
    drafter_params = program.drafter.params(jax.random.key(experiment.drafter_seed), subject.model, subject.params)
    bets = [EProcess(np.append(joint.cells, 0.0)) for joint in joints]
    for tally in sampler.sample(
        program, subject, drafter_params, settings, new_tokens=length, samples=samples, seed=seed
    ):
        for bet, counts in zip(bets, tally.cells, strict=True):
            bet.update(counts)
        progress(f"{subject.name}: {int(tally.cells.sum()):,} sequences")
    after = [f", after {list(prompts[0])}" if len(subject.contexts) > 1 else "" for prompts in subject.contexts]
    names = [f"{setting}{place}" for place in after for setting in settings]
    results, cases = [], []
    for index, (name, joint) in enumerate(zip(names, joints, strict=True)):
        results += case_results(f"{subject.name}, {name}", tally, index, joint, bets[index])
        counts = tally.accepted[index]
        mean = float((counts * np.arange(len(counts))).sum() / counts.sum())
        cases.append(Case(name, joint.cells, np.asarray(tally.cells[index]), 1.0, mean))
    return cases, results, tally, joints


def joint_laws(subject: Subject, settings: Sequence[Setting], length: int, end_id: int = -1) -> list[Joint]:
    """The exact law of every case, in the order of their numbers."""
    laws = [
        enumerate_joint(subject.model, subject.params, prompts[-1], s.sampler(), length, subject.tokens)
        for prompts in subject.contexts
        for s in settings
    ]
    return laws if end_id < 0 else [law.stopped(end_id) for law in laws]


def case_results(where: str, tally: Tally, index: int, joint: Joint, bet: EProcess) -> list[Result]:
    """All tests of one case. Sequences outside of every cell are a failure of the joint test by themselves."""
    cells = np.asarray(tally.cells[index])
    counts, lost = cells[:-1], cells[-1]
    first = statistics.joint_test(counts, joint, where)
    if lost > 0:
        first = Result("joint", f"{where}: {int(lost)} sequences with an id of probability 0, or cut", np.inf, 0, 0.0)
    results = [first, Result("sequential", where, bet.largest, 0, bet.p_value)]
    results += statistics.conditional_tests(counts, joint, where)
    results += statistics.independence_tests(counts, joint, where)
    return [*results, *identity.efficiency(tally, index, where)]


def adjust(results: Sequence[Result], shares: dict[str, float] | None = None) -> list[Result]:
    """Correct a family of p-values by the weighted Holm method."""
    shares = shares or SHARES
    sizes = {name: sum(result.test == name for result in results) for name in shares}
    weights = [shares[result.test] / sizes[result.test] for result in results]
    adjusted = statistics.holm([result.p_value for result in results], weights)
    return [dataclasses.replace(r, adjusted=a) for r, a in zip(results, adjusted, strict=True)]


def _needed(cases: Sequence[Case], joints: Sequence[Joint], detect: float, level: float) -> int:
    """Sequences in all that bring every case to the asked power."""
    total = sum(case.counts.sum() for case in cases)
    return max(
        int(statistics.samples_needed(detect, joint.cells, level) * total / case.counts.sum()) + 1
        for case, joint in zip(cases, joints, strict=True)
    )
