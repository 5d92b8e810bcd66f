"""What block verification gains over token verification, on real text: acceptance lengths at temperature 1.

    python -m specjax.experiments.block_gain --prompts question.jsonl      # again and again, until all is done

Both rules decode the same prompts with the same drafters and the same seeds. Raw counts of every prompt go to
`OUTPUT.jsonl` batch by batch: the same command goes on where it stopped. The table is made of what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax import Engine, load_drafter, load_target, verify
from specjax.evaluate import prompts
from specjax.evaluate.store import Store

DRAFTERS = ("fp8", "external")  # accepted nearly always, and a depth-pruned copy that is accepted now and then
WINDOWS = (4, 6, 8)
RULES: dict[str, verify.Rule] = {"token": verify.Token(), "block": verify.Block()}
PUBLISHED = {4: 3.46, 6: 6.19, 8: 8.30}
"""Gain in %, PaLM-2-S with PaLM-2-XXS, mean of eight data sets; Sun et al. 2024, arXiv 2403.10444."""

CAPACITY, BATCH = 512, 8
RESAMPLES = 10_000
FIELDS = ("drafted", "tested", "accepted", "emitted", "overlap")
Row = dict[str, Any]
Done = dict[str, dict[str, dict[str, float]]]  # by job, then by question_id


@dataclasses.dataclass(frozen=True)
class Job:
    """One drafter under one rule, with one seed, on all prompts."""

    drafter: str
    window: int
    rule: str
    seed: int

    def __str__(self) -> str:
        return f"{self.drafter} K={self.window} {self.rule} seed={self.seed}"


def jobs(seeds: int) -> list[Job]:
    """Seed by seed, so that a study that was stopped early is balanced."""
    return [
        Job(name, window, rule, seed)
        for seed in range(seeds)
        for name in DRAFTERS
        for window in WINDOWS
        for rule in RULES
    ]


def main(arguments: list[str] | None = None) -> None:
    """Do what is not done yet, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON lines in Spec-Bench's form; by default specjax's own")
    parser.add_argument("--limit", type=int, default=24, help="prompts, by the fixed balanced rule")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no batch after these")
    parser.add_argument("--output", type=Path, default=Path("experiments/block_gain"))
    args = parser.parse_args(arguments)
    began, store = time.perf_counter(), Store(args.output.with_suffix(".jsonl"), _key)
    settings = {"target": args.target, "new_tokens": args.new_tokens, "limit": args.limit, "temperature": 1.0}
    for row in store.rows:
        if row["settings"] != settings:
            raise SystemExit(f"{store.path} holds {row['settings']}, not {settings}: choose another --output")
    for job, counts in measure(args, store):
        for question_id, found in counts.items():
            store.append({"job": str(job), "question_id": question_id, "settings": settings, "counts": found})
        args.output.with_suffix(".md").write_text(table(results(store), args.seeds))
        print(f"{time.perf_counter() - began:6.0f} s  {job}: {', '.join(counts)}", flush=True)
        if time.perf_counter() - began > args.seconds:
            break
    print(table(results(store), args.seeds))


def _key(row: Row) -> tuple[str, str]:
    return row["job"], row["question_id"]


def results(store: Store[Row]) -> Done:
    """What is done."""
    done: Done = {}
    for row in store.rows:
        done.setdefault(row["job"], {})[row["question_id"]] = row["counts"]
    return done


def measure(
    args: argparse.Namespace, store: Store[dict[str, Any]]
) -> Iterator[tuple[Job, dict[str, dict[str, float]]]]:
    """Counts of one batch of prompts after the other, of those that are missing."""
    target, source = load_target(args.target), prompts.load(args.prompts)
    encoded = {prompt.question_id: target.encode(prompt.text) for prompt in source}
    room = CAPACITY - args.new_tokens
    short = tuple(prompt for prompt in source if len(encoded[prompt.question_id]) <= room)  # prefill stays short
    chosen = {p.question_id: p for p in prompts.select(dataclasses.replace(source, prompts=short), limit=args.limit)}
    for job in jobs(args.seeds):
        left = [name for _, name in store.missing((str(job), name) for name in chosen)]
        if left:
            engine = Engine(target, load_drafter(job.drafter, num_speculative_tokens=job.window), rule=RULES[job.rule])
        for first in range(0, len(left), BATCH):
            names = left[first : first + BATCH]
            ids = [encoded[name] for name in names]
            padded = [*ids, *[ids[-1]] * (BATCH - len(ids))]  # one shape, one compilation
            rows = [*(chosen[name].row for name in names), *range(1 << 20, (1 << 20) + BATCH - len(ids))]
            found = engine.generate(
                padded, max_new_tokens=args.new_tokens, seed=job.seed, rows=rows, temperature=1.0, capacity=CAPACITY
            )
            yield job, {name: _counts(got.counts) for name, got in zip(names, found, strict=False)}


def _counts(counts: Any) -> dict[str, float]:
    sums = {name: float(np.sum(getattr(counts, name))) for name in FIELDS}
    return {"rounds": float(len(counts.emitted)), **sums}


def table(done: Done, seeds: int) -> str:
    """Acceptance lengths, and the gain with its paired interval over prompts, counted and expected."""
    lines = [
        "| drafter | K | prompts | answers each | token | block | gain | expected gain | published |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in DRAFTERS:
        for window in WINDOWS:
            parts = [[done.get(str(Job(name, window, rule, s)), {}) for s in range(seeds)] for rule in RULES]
            whole = [s for s in range(seeds) if parts[0][s] and parts[0][s].keys() == parts[1][s].keys()]
            if not whole:
                continue
            names = sorted(set.intersection(*(set(parts[0][s]) for s in whole)))
            rounds, emitted, overlap = (
                np.array([[sum(rule[s][n][field] for s in whole) for n in names] for rule in parts])
                for field in ("rounds", "emitted", "overlap")
            )
            lengths = emitted.sum(1) / rounds.sum(1)
            lines.append(
                f"| {name} | {window} | {len(names)} | {len(whole)} | {lengths[0]:.3f} | {lengths[1]:.3f} "
                f"| {gain(emitted, rounds)} | {gain(rounds + overlap, rounds)} | {PUBLISHED[window]:+.1f} % |"
            )
    return "\n".join([*lines, "", NOTES]) + "\n"


NOTES = """Acceptance length: tokens a round, pooled over prompts, at temperature 1. Gain: block over token, with the
95 % interval of a bootstrap that draws prompts, both rules' counts together. Expected gain: the same of the tokens
that the drafts promise (1 + overlap, a round), with less of the noise of acceptance. Published: PaLM-2-S with
PaLM-2-XXS, mean of eight data sets (Sun et al. 2024, arXiv 2403.10444)."""


def gain(above: np.ndarray, below: np.ndarray) -> str:
    """Percent by which the second row's ratio exceeds the first's, with a paired interval over columns."""
    chosen = np.random.default_rng(0).integers(0, above.shape[1], (RESAMPLES, above.shape[1]))
    drawn = _percent(above[:, chosen].sum(-1), below[:, chosen].sum(-1))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return f"{_percent(above.sum(1), below.sum(1)):+.1f} % [{low:+.1f}, {high:+.1f}]"


def _percent(above: Sequence[Any] | np.ndarray, below: Sequence[Any] | np.ndarray) -> Any:
    return 100 * ((above[1] / below[1]) / (above[0] / below[0]) - 1)


if __name__ == "__main__":
    main()
