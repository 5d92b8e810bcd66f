"""Does the exactness lab keep its promises? Error rates, mutants, efficiency, and every drafter of the project.

    python -m specjax.experiments.calibration --seconds 240      # again and again, until it says that all is done

Jobs run in turn; each one's raw result goes to `OUTPUT.jsonl` as it ends, with the tables made of all of them in
`OUTPUT.md`. A run that ends or is stopped loses one job at most; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.experiments import calibration_tables, error_rates

from specjax import decode, plugins
from specjax.evaluate.store import Store
from specjax.exactness import lab
from specjax.exactness.experiment import Setting
from specjax.exactness.mutants import BLOCK_MUTANTS, CONTROLS, VERIFY_MUTANTS, Mutant, score
from specjax.exactness.subjects import llama_subject

SETTINGS = (Setting(1.0), Setting(0.7, top_p=0.8), Setting(1.0, top_k=5), Setting(1.0, min_p=0.1), Setting(0.0))
DRAFTERS = {
    "ngram": ("ngram", {}), "early-exit": ("early-exit", {"exit_layer": "1"}), "external": ("external", {}),
    "fp8 kv=shared": ("fp8", {}), "fp8 kv=own": ("fp8", {"kv": "own"}),
}  # fmt: skip
DRAFTS = (1, 3, 7)
CHUNK = 50  # seeds a job
COMMITTED = Path(__file__).with_suffix(".jsonl")
Job = Callable[[], Any]


def jobs(seeds: int) -> dict[str, Job]:
    """Everything that is to be done, by name."""
    found: dict[str, Job] = {}
    for name in DRAFTERS:
        for count in DRAFTS:
            found[f"drafter: {name}, K = {count}"] = functools.partial(grid, name, count)
    found["hardest direction"] = functools.partial(error_rates.hardest_direction, 20_000, 8192)
    for first in range(0, seeds, CHUNK):
        name = f"seeds {first} to {min(first + CHUNK, seeds) - 1}"
        part = range(first, min(first + CHUNK, seeds))
        found[f"right rule: {name}"] = functools.partial(error_rates.false_alarms, part)
        found[f"large vocabulary: {name}"] = functools.partial(error_rates.transform_alarms, part)
        if first < seeds // 2:
            found[f"planted deviation: {name}"] = functools.partial(error_rates.detections, part)
    others = CONTROLS + VERIFY_MUTANTS[: -len(BLOCK_MUTANTS)]
    parts = [(others[first : first + 10], score.SAMPLES) for first in range(0, len(others), 10)]
    for part, samples in [*parts, (BLOCK_MUTANTS, lab.SAMPLES)]:  # the block rules' faults are small: all samples
        found[f"mutants: {part[0].name} to {part[-1].name}"] = functools.partial(_panel, part, samples)
    found["mutants: lying drafters"] = lambda: _plain(score.liars())
    found["mutants: cache and loops"] = lambda: _plain(score.others())
    return found


def _panel(mutants: list[Mutant], samples: int) -> list[dict[str, Any]]:
    return _plain(score.panel(mutants, samples=samples))


def _plain(rows: list[score.Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


def grid(name: str, drafts: int, samples: int = 1 << 17, settings: tuple[Setting, ...] = SETTINGS) -> dict[str, Any]:
    """One drafter at one number of drafts: ragged prompts, all settings mixed in a batch.

    Six ids, so that top-k 5 leaves one out; a window of seven has too many cells then, and a vocabulary of two
    goes through all of it in a second experiment of the same family.
    """
    spec, fields = DRAFTERS[name]
    chosen = plugins.load_drafter(spec, fields | {"num_speculative_tokens": str(drafts)})
    sizes = {1: [(6, 3)], 3: [(6, 4)], 7: [(6, 4), (2, 9)]}[drafts]
    experiments = []
    for vocab, length in sizes:
        subject = llama_subject(vocab)
        program = decode.Program(subject.model, chosen)
        experiments.append(lab.Experiment(program, subject, settings, new_tokens=length))
    report = lab.run(experiments, samples, lab.ALPHA, 0.1, seed=0)
    best = report.strongest()
    return {
        "verdict": report.verdict, "samples": report.samples, "tests": len(report.results),
        "detectable": report.detectable, "p_value": min(r.p_value for r in report.results),
        "adjusted": best.adjusted, "test": best.test, "seconds": report.seconds,
        "accepted": max(case.accepted_per_round for case in report.cases),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Do what is not done yet, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=400, help="of the right rule; half as many of the deviation")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no job after these")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose names start with this")
    parser.add_argument("--output", type=Path, default=Path("experiments/calibration"))
    parser.add_argument("--readme", type=Path, default=Path("specjax/exactness/README.md"), help="its tables, too")
    args = parser.parse_args(arguments)
    began, store = time.perf_counter(), open_store(args.output.with_suffix(".jsonl"))
    chosen = {name: job for name, job in jobs(args.seeds).items() if name.startswith(args.only)}
    for name in store.missing(chosen, args.seconds):
        store.append({"job": name, "result": chosen[name]()})
        _write_tables(results(store), args.output.with_suffix(".md"), args.readme)
        print(f"{time.perf_counter() - began:6.0f} s  {name}", flush=True)
    left = list(store.missing(chosen))
    print(f"{len(left)} jobs left: {', '.join(left)}" if left else calibration_tables.markdown(results(store)))


def open_store(path: Path = COMMITTED) -> Store[dict[str, Any]]:
    """What is done, by the name of the job; by default of the committed study."""
    return Store(path, lambda row: row["job"])


def results(store: Store[dict[str, Any]]) -> dict[str, Any]:
    """Each job's raw result."""
    return {row["job"]: row["result"] for row in store.rows}


def _write_tables(done: dict[str, Any], tables: Path, readme: Path) -> None:
    tables.write_text(calibration_tables.markdown(done))
    if readme.is_file() and calibration_tables.BEGIN in readme.read_text():
        readme.write_text(calibration_tables.into_readme(readme.read_text(), done))


if __name__ == "__main__":
    main()
