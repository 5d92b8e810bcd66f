"""The lab's own test: every mutant must be rejected, every control must pass.

Mutants of the verification share one program, a row each (`mutants.Panel`), and so do the lying drafters;
the cache and the loops are run one by one. The tests, levels and settings are those of `check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.exactness import identity, lab, sampler, statistics
from specjax.exactness.faulty_drafters import FAULTY_DRAFTERS, Liars, StaleTable
from specjax.exactness.faulty_loops import extra_counted, late_end
from specjax.exactness.mutants import CONTROLS, VERIFY_MUTANTS, Mutant, Panel
from specjax.exactness.sampler import Setting
from specjax.exactness.statistics import EProcess, Result
from specjax.exactness.subjects import Subject, TableDrafter, instances

PANEL_SETTINGS = (Setting(1.0, weight=3), Setting(0.7, top_p=0.8))


@dataclass(frozen=True)
class Row:
    """A line of the mutation table."""

    name: str
    fault: str
    killed_by: tuple[str, ...]
    p_value: float  # the smallest, after correction
    total_variation: float  # observed, joint law, worst setting
    accepted_per_round: float
    samples: int


def panel(
    mutants: Sequence[Mutant] = tuple(CONTROLS + VERIFY_MUTANTS),
    *,
    samples: int = 100_000,
    num_speculative_tokens: int = 3,
    alpha: float = lab.ALPHA,
    seed: int = 0,
    batch: int = sampler.BATCH,
    with_gate: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Test every mutant of the verification with `samples` sequences each, at the level `alpha` each."""
    subject, drafter = instances(num_speculative_tokens)[0]
    program = decode.Program(subject.model, drafter, verifier=Panel(tuple(mutants)))
    tally, joints, bets = _share(program, subject, len(mutants), samples, seed, batch, progress)
    rows = []
    for number, mutant in enumerate(mutants):
        indices = range(number * len(PANEL_SETTINGS), (number + 1) * len(PANEL_SETTINGS))
        results = [
            result
            for index, setting in zip(indices, PANEL_SETTINGS, strict=True)
            for result in lab.case_results(str(setting), tally, index, joints[index], bets[index])
        ]
        if mutant.verifier is not None:  # accepted counts have a closed form for the token walk alone
            results = [result for result in results if result.test != "efficiency"]
        results = lab.adjust(results)
        if mutant.rule is not None and with_gate:
            results += identity.check_rule(mutant.rule)[1]
        rows.append(_row(mutant.name, mutant.fault, results, tally, indices, joints, alpha))
    return rows


def liars(
    *, samples: int = 100_000, num_speculative_tokens: int = 3, alpha: float = lab.ALPHA, seed: int = 0,
    batch: int = sampler.BATCH, progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:  # fmt: skip
    """Test every drafter that reports another law than it draws from, in one program."""
    subject, right = instances(num_speculative_tokens)[0]
    program = decode.Program(subject.model, Liars(right.num_speculative_tokens, right.order, right.seed))
    tally, joints, bets = _share(program, subject, len(FAULTY_DRAFTERS), samples, seed, batch, progress)
    rows = []
    for number, (name, kind) in enumerate(FAULTY_DRAFTERS.items()):
        indices = range(number * len(PANEL_SETTINGS), (number + 1) * len(PANEL_SETTINGS))
        results = [
            result
            for index, setting in zip(indices, PANEL_SETTINGS, strict=True)
            for result in lab.case_results(str(setting), tally, index, joints[index], bets[index])
        ]
        results = [*lab.adjust(results), *identity.replay_results(tally, slice(indices.start, indices.stop))]
        rows.append(_row(name, kind.__doc__ or "", results, tally, indices, joints, alpha))
    return rows


def _share(
    program: decode.Program, subject: Subject, count: int, samples: int, seed: int, batch: int,
    progress: Callable[[str], None],
) -> tuple[sampler.Tally, list[statistics.Joint], list[EProcess]]:  # fmt: skip
    """Sample a program whose rows belong to `count` mutants in turn."""
    length = lab.Experiment(program, subject).length
    joints = lab.joint_laws(subject, PANEL_SETTINGS, length) * count
    bets = [EProcess(np.append(joint.cells, 0.0)) for joint in joints]
    params = program.drafter.params(jax.random.key(0), subject.model, subject.params)
    cases = _deal(subject, count, length, batch)
    for tally in sampler.sample(
        program, subject, params, PANEL_SETTINGS, new_tokens=length, samples=samples * count, seed=seed, cases=cases
    ):
        for bet, counts in zip(bets, tally.cells, strict=True):
            bet.update(counts)
        progress(f"{int(tally.cells.sum()):,} sequences")
    return tally, joints, bets


def _deal(subject: Subject, mutants: int, length: int, batch: int) -> sampler.Cases:
    """Rows in turn to each mutant; each mutant's rows in turn to settings and prompts."""
    cases = sampler.make_cases(subject, PANEL_SETTINGS, length, batch)
    turn = np.arange(batch) // mutants
    pick = lambda leaf: np.asarray(leaf)[turn]  # noqa: E731
    return sampler.Cases(
        pick(cases.tokens),
        pick(cases.length),
        (np.arange(batch) % mutants * len(PANEL_SETTINGS) + pick(cases.case)).astype(np.int32),
        jax.tree.map(lambda leaf: jnp.asarray(pick(leaf)), cases.sampler),
        mutants * len(PANEL_SETTINGS),
    )


def _row(
    name: str, fault: str, results: Sequence[Result], tally: sampler.Tally, indices: range,
    joints: Sequence[statistics.Joint], alpha: float,
) -> Row:  # fmt: skip
    killers = sorted({r.test for r in results if r.adjusted <= alpha})
    distances, samples, accepted = [], 0, []
    for index in indices:
        counts = tally.cells[index]
        law = np.append(joints[index].cells, 0.0)
        distances.append(0.5 * float(np.abs(counts / counts.sum() - law).sum()))
        samples += int(counts.sum())
        accepted.append(float((tally.accepted[index] * np.arange(tally.accepted.shape[1])).sum() / counts.sum()))
    smallest = min(result.adjusted for result in results)
    return Row(name, fault, tuple(killers), smallest, max(distances), accepted[0], samples)


def others(
    *, samples: int = 100_000, num_speculative_tokens: int = 3, alpha: float = lab.ALPHA, seed: int = 0,
    names: Sequence[str] | None = None,
) -> list[Row]:  # fmt: skip
    """Test the cache and the loops that are wrong, one program each."""
    subject, right = instances(num_speculative_tokens)[0]
    rows = []
    for name, (fault, experiment, end_id) in _others(subject, right).items():
        if names is not None and name not in names:
            continue
        _, results, tally, joints = lab.measure(experiment, PANEL_SETTINGS, samples, seed, end_id=end_id)
        results = [*lab.adjust(results), *identity.replay_results(tally)]
        rows.append(_row(name, fault, results, tally, range(len(PANEL_SETTINGS)), joints, alpha))
    return rows


def _others(subject: Subject, right: TableDrafter) -> dict[str, tuple[str, lab.Experiment, int]]:
    found = {}
    stale = StaleTable(subject.model.vocab_size, right.order)
    program = decode.Program(subject.model, right)
    found["StaleCache"] = (
        "the cache keeps rejected drafts",
        lab.Experiment(dataclasses.replace(program, model=stale), subject), -1,
    )  # fmt: skip
    for loop in (late_end, extra_counted):
        end_id = 0 if loop is late_end else -1
        found[loop.__name__] = ((loop.__doc__ or ""), lab.Experiment(program, subject, loop=loop), end_id)
    return found
