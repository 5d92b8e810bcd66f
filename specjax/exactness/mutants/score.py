"""The lab's own test: every mutant must be rejected, every control must pass.

Instances, settings, tests and levels are those of `check`; mutants of the verification share one program,
a block of rows each (`Panel`), and so do the lying drafters. The cache and the loops run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.exactness import gate, identity, lab, sampler
from specjax.exactness.mutants.drafters import FAULTY_DRAFTERS, Liars, StaleTable, bonus_counted, late_end
from specjax.exactness.mutants.panel import CONTROLS, VERIFY_MUTANTS, Mutant, Panel
from specjax.exactness.oracle import Joint
from specjax.exactness.sampler import Setting, Tally
from specjax.exactness.statistics import EProcess, Result
from specjax.exactness.subjects import Subject, TableDrafter, instances
from specjax.types import Model

SAMPLES = 1 << 17
"""Sequences a mutant: an eighth of what `check` takes (a fault that this kills, more would kill)."""

ROWS = 224
"""Rows of a batch a mutant: a multiple of the settings' weights (7) times an instance's prompts (4)."""

Pairs = Sequence[tuple[Subject, TableDrafter]]
Progress = Callable[[str], None]


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
    settings: Sequence[Setting] = lab.SETTINGS, samples: int = SAMPLES, seed: int = 0, with_gate: bool = True,
    progress: Progress = lambda text: None,
) -> list[Row]:  # fmt: skip
    """Test every mutant of the verification with `samples` sequences each, at the level of `check` each."""
    shares, pairs = [], pairs or chosen()
    for subject, drafter in pairs:
        program = decode.Program(subject.model, drafter, Panel(tuple(mutants)))
        shares.append(_Share(program, subject, settings, len(mutants), samples // len(pairs), seed, progress))
    rows = []
    for number, mutant in enumerate(mutants):
        results = [result for share in shares for result in share.results(number)]
        if not gate.applies(mutant.rule):  # the closed form of its accepted counts is not its own
            results = [result for result in results if result.test != "efficiency"]
        results = lab.adjust(results)
        if with_gate:
            results += identity.check_rule(mutant.rule)[1]
        rows.append(_row(mutant.name, mutant.fault, results, shares, number))
    return rows


def liars(
    *, pairs: Pairs | None = None, settings: Sequence[Setting] = lab.SETTINGS, samples: int = SAMPLES, seed: int = 0,
    progress: Progress = lambda text: None,
) -> list[Row]:  # fmt: skip
    """Test every drafter that reports another law than it draws from."""
    shares, pairs = [], pairs or chosen()
    for subject, right in pairs:
        drafter = Liars(right.num_speculative_tokens, right.order, right.seed)
        program = decode.Program(subject.model, drafter)
        count = samples // len(pairs)
        shares.append(_Share(program, subject, settings, len(FAULTY_DRAFTERS), count, seed, progress))
    rows = []
    for number, (name, kind) in enumerate(FAULTY_DRAFTERS.items()):
        results = lab.adjust([result for share in shares for result in share.results(number)])
        results += [r for share in shares for r in identity.replay_results(share.tally, share.cases_of(number))]
        rows.append(_row(name, kind.__doc__ or "", results, shares, number))
    return rows


def others(
    *, settings: Sequence[Setting] = lab.SETTINGS, samples: int = SAMPLES, seed: int = 0,
    names: Sequence[str] | None = None, progress: Progress = lambda text: None,
) -> list[Row]:  # fmt: skip
    """Test the cache and the loops that are wrong, one program each, on the first instance."""
    subject, right = chosen()[0]
    stale = StaleTable(subject.model.vocab_size, right.order)
    faults: list[tuple[str, str, Model, sampler.Loop, int]] = [
        ("StaleCache", "the cache keeps rejected drafts", stale, decode.run, -1),
        ("late_end", late_end.__doc__ or "", subject.model, late_end, 0),
        ("bonus_counted", bonus_counted.__doc__ or "", subject.model, bonus_counted, -1),
    ]
    rows = []
    for name, fault, model, loop, end_id in faults:
        if names is None or name in names:
            program = decode.Program(model, right)
            share = _Share(program, subject, settings, 1, samples, seed, progress, loop, end_id)
            results = [*lab.adjust(share.results(0)), *identity.replay_results(share.tally)]
            rows.append(_row(name, fault, results, [share], 0))
    return rows


class _Share:
    """Samples of one program whose rows belong to `mutants` mutants, a block each."""

    def __init__(
        self, program: decode.Program, subject: Subject, settings: Sequence[Setting], mutants: int, samples: int,
        seed: int, progress: Progress, loop: sampler.Loop = decode.run, end_id: int = -1,
    ):  # fmt: skip
        length = lab.Experiment(program, subject).length
        self.name, self.settings = subject.name, settings
        self.joints = lab.joint_laws(subject, settings, length, end_id)
        self.bets = [EProcess(np.append(joint.cells, 0.0)) for joint in self.joints * mutants]
        params = program.drafter.params(jax.random.key(0), subject.model, subject.params)
        batches = sampler.sample(
            program, subject, params, settings, new_tokens=length, samples=samples * mutants, seed=seed, loop=loop,
            end_id=end_id, cases=_deal(sampler.make_cases(subject, settings, length, ROWS), mutants),
        )  # fmt: skip
        for tally in batches:
            for bet, counts in zip(self.bets, tally.cells, strict=True):
                bet.update(counts)
            progress(f"{subject.name}: {int(tally.cells.sum()):,} sequences")
        self.tally: Tally = tally

    def cases_of(self, number: int) -> slice:
        """Rows of the tally that belong to one mutant."""
        return slice(number * len(self.settings), (number + 1) * len(self.settings))

    def results(self, number: int) -> list[Result]:
        """Every test of one mutant, not yet corrected."""
        found = []
        for offset, setting in enumerate(self.settings):
            index = number * len(self.settings) + offset
            where = f"{self.name}, {setting}"
            found += lab.case_results(where, self.tally, index, self.joints[offset], self.bets[index])
        return found


def _deal(cases: sampler.Cases, mutants: int) -> sampler.Cases:
    """The same rows for each mutant."""
    count = cases.count * mutants
    tokens, length, sampling = jax.tree.map(
        lambda leaf: jnp.concatenate([leaf] * mutants), (cases.tokens, cases.length, cases.sampler)
    )
    case = np.concatenate([cases.case + number * cases.count for number in range(mutants)])
    return sampler.Cases(np.asarray(tokens), np.asarray(length), case.astype(np.int32), sampling, count)


def _row(name: str, fault: str, results: Sequence[Result], shares: Sequence[_Share], number: int) -> Row:
    distances, samples = [], 0
    for share in shares:
        for counts, joint in zip(share.tally.cells[share.cases_of(number)], share.joints, strict=True):
            distances.append(_distance(counts, joint))
            samples += int(counts.sum())
    histogram = shares[0].tally.accepted[number * len(shares[0].settings)]
    chance, values = histogram / histogram.sum(), np.arange(len(histogram))
    mean = float(chance @ values)
    error = float(np.sqrt((chance @ (values - mean) ** 2) / histogram.sum()))
    smallest: dict[str, float] = {}
    for result in results:
        smallest[result.test] = min(result.adjusted, smallest.get(result.test, 1.0))
    return Row(name, fault, smallest, max(distances), mean, error, samples)


def _distance(counts: np.ndarray, joint: Joint) -> float:
    return 0.5 * float(np.abs(counts / counts.sum() - np.append(joint.cells, 0.0)).sum())
