"""The lab's own test: every mutant must be rejected, every control must pass.

Instances, settings, tests and levels are those of `check`; mutants of the verification share one program,
a block of rows each (`Panel`), and so do the lying drafters. The cache and the loops run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specjax import decode
from specjax.exactness import gate, identity, lab
from specjax.exactness.experiment import SETTINGS, Experiment, Setting, make_cases
from specjax.exactness.mutants.drafters import LIARS, Liars, StaleTable, bonus_counted, late_end
from specjax.exactness.mutants.panel import CONTROLS, VERIFY_MUTANTS, Mutant, Panel
from specjax.exactness.statistics import TestResult
from specjax.exactness.subjects import Subject, TableDrafter, instances

SAMPLES = 1 << 17
"""Sequences a mutant: an eighth of what `check` takes (a fault that this kills, more would kill)."""

ROWS = 224
"""Rows of a batch a mutant: a multiple of the settings' weights (7) times an instance's prompts (4)."""

Pairs = Sequence[tuple[Subject, TableDrafter]]


@dataclass(frozen=True)
class Row:
    """A line of the mutation table."""

    name: str
    fault: str
    p_values: dict[str, float]  # the smallest of each test, after correction over the mutant's family
    total_variation: float  # of the observed joint law, worst case; sampling noise alone gives some, too
    accepted_per_round: float  # first round, first instance, temperature 1
    accepted_error: float  # standard error of the former
    samples: int

    @property
    def killed_by(self) -> tuple[str, ...]:
        """Tests that reject."""
        return tuple(test for test, p_value in self.p_values.items() if p_value <= lab.ALPHA)


def chosen() -> Pairs:
    """The instances of `check`."""
    return [*instances(3), *instances(2)]


def panel(
    mutants: Sequence[Mutant] = tuple(CONTROLS + VERIFY_MUTANTS), *, pairs: Pairs | None = None,
    settings: Sequence[Setting] = SETTINGS, samples: int = SAMPLES, seed: int = 0, with_gate: bool = True,
    progress: lab.Progress = lab.silent,
) -> list[Row]:  # fmt: skip
    """Test every mutant of the verification with `samples` sequences each, at the level of `check` each."""
    rule = Panel(tuple(mutants))
    experiments = [Experiment(decode.Program(s.model, d, rule), s, settings) for s, d in pairs or chosen()]
    found = _gather(experiments, len(mutants), samples, seed, progress)
    rows = []
    for part, mutant in enumerate(mutants):
        results = [result for evidence in found for result in evidence.results(part)]
        if not gate.applies(mutant.rule):  # the closed form of its accepted counts is not its own
            results = [result for result in results if result.test != "efficiency"]
        results = lab.adjust(results)
        if with_gate:
            results += identity.check_rule(mutant.rule)[1]
        rows.append(_row(mutant.name, mutant.fault, results, found, part))
    return rows


def liars(
    *, pairs: Pairs | None = None, settings: Sequence[Setting] = SETTINGS, samples: int = SAMPLES, seed: int = 0,
    progress: lab.Progress = lab.silent,
) -> list[Row]:  # fmt: skip
    """Test every drafter that reports another law than it draws from."""
    experiments = [
        Experiment(decode.Program(s.model, Liars(d.num_speculative_tokens, d.order, d.seed)), s, settings)
        for s, d in pairs or chosen()
    ]
    found = _gather(experiments, len(LIARS), samples, seed, progress)
    return [_row_with_replay(liar.name, liar.fault, found, part) for part, liar in enumerate(LIARS)]


def others(
    *, settings: Sequence[Setting] = SETTINGS, samples: int = SAMPLES, seed: int = 0,
    names: Sequence[str] | None = None, progress: lab.Progress = lab.silent,
) -> list[Row]:  # fmt: skip
    """Test the cache and the loops that are wrong, one program each, on the first instance."""
    subject, right = chosen()[0]
    program = decode.Program(subject.model, right)
    stale = decode.Program(StaleTable(subject.model.vocab_size, right.order), right)
    faults = {
        "StaleCache": ("the cache keeps rejected drafts", Experiment(stale, subject, settings)),
        "late_end": (late_end.__doc__, Experiment(program, subject, settings, loop=late_end, end_id=0)),
        "bonus_counted": (bonus_counted.__doc__, Experiment(program, subject, settings, loop=bonus_counted)),
    }
    return [
        _row_with_replay(name, fault or "", _gather([experiment], 1, samples, seed, progress), 0)
        for name, (fault, experiment) in faults.items()
        if names is None or name in names
    ]


def _gather(
    experiments: Sequence[Experiment], mutants: int, samples: int, seed: int, progress: lab.Progress
) -> list[lab.Evidence]:
    """Of programs whose rows belong to `mutants` mutants, a block each; `samples` of a mutant in all."""
    share = samples // len(experiments) * mutants
    return [lab.gather(e, share, seed, progress, cases=make_cases(e, ROWS).times(mutants)) for e in experiments]


def _row_with_replay(name: str, fault: str, found: Sequence[lab.Evidence], part: int) -> Row:
    results = lab.adjust([result for evidence in found for result in evidence.results(part)])
    results += [r for e in found for r in identity.replay_results(e.tally.replays(e.cases_of(part)))]
    return _row(name, fault, results, found, part)


def _row(name: str, fault: str, results: Sequence[TestResult], found: Sequence[lab.Evidence], part: int) -> Row:
    distances, samples = [], 0
    for evidence in found:
        cells = evidence.tally.cells[evidence.cases_of(part)]
        for counts, joint in zip(cells, evidence.experiment.joints, strict=True):
            distances.append(0.5 * float(np.abs(counts / counts.sum() - np.append(joint.cells, 0.0)).sum()))
            samples += int(counts.sum())
    histogram = found[0].tally.accepted[found[0].cases_of(part)][0]
    chance, values = histogram / histogram.sum(), np.arange(len(histogram))
    mean = float(chance @ values)
    error = float(np.sqrt((chance @ (values - mean) ** 2) / histogram.sum()))
    smallest: dict[str, float] = {}
    for result in results:
        smallest[result.test] = min(result.adjusted, smallest.get(result.test, 1.0))
    return Row(name, fault, smallest, max(distances), mean, error, samples)
