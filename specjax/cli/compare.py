"""`specjax compare`: the same prompts with every drafter, in turn; one table, and a run folder as it goes."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax import memory, offload
from specjax.cli import options, plots, table
from specjax.cli.errors import Failure, Refusal, refusing
from specjax.cli.progress import Progress
from specjax.engine import Engine, NotFiniteError
from specjax.evaluate import measure
from specjax.evaluate import run_folder as records
from specjax.evaluate.preparation import DRAFTERS, SMALLEST_CAPACITY, Plan, make_manifest, make_plan
from specjax.evaluate.record import Record
from specjax.evaluate.rows import BASELINE, Measured, make_rows
from specjax.evaluate.run_folder import RunFolder, RunFolderError
from specjax.memory import device
from specjax.memory.compiler import read as read_compiled
from specjax.memory.tiers import offloaded_account
from specjax.types import Params


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    options.add_model_arguments(parser)
    parser.add_argument(
        "--drafter", action="append", metavar="NAME", dest="drafters",
        help="a name or ./file.py:Class, with settings as NAME:FIELD=VALUE,...; may be repeated; `none` is always run "
        f"(default: {', '.join(DRAFTERS)})",
    )  # fmt: skip
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines in Spec-Bench's form (default: the built-in set)")
    parser.add_argument("--category", action="append", default=[], help="only prompts of this kind; may be repeated")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--limit", type=options.positive,
        help="decode this many prompts, a fixed sample balanced over the kinds (default: one of each kind, of those "
        f"that fit into {SMALLEST_CAPACITY} slots with their answers, so that one compilation serves all)",
    )  # fmt: skip
    amount.add_argument("--all", action="store_true", help="decode every prompt")
    parser.add_argument("--max-new-tokens", type=options.not_negative, default=48, help="default: %(default)s")
    parser.add_argument("--batch-size", type=options.positive, default=1, help="prompts decoded together (default: 1)")
    parser.add_argument(
        "--offload", choices=offload.PLACES, default="",
        help="keep drafters' weights in host memory between drafts, and measure what bringing them in costs",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="run folder (default: runs/<date>-compare)")


@dataclass
class Run:
    """A run under way: what was decoded and measured so far."""

    plan: Plan
    folder: RunFolder
    engines: dict[str, Engine]
    session: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    records: list[Record] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    compiled: set[tuple[str, int]] = field(default_factory=set)


def run(args: argparse.Namespace) -> int:
    """Decode, print the table, write the folder; returns the exit code."""
    with refusing():
        plan = make_plan(args)
    try:
        folder = _open_folder(plan)
    except RunFolderError as error:
        raise Refusal(str(error)) from error
    if folder.summary is not None:
        print(f"{folder.path} is complete; this is its table. Choose another --out to run again.", file=sys.stderr)
        table.print_table(folder.summary["rows"], folder.summary["title"])
        return 0
    try:
        return _carry_out(plan, folder)
    except RunFolderError as error:
        raise Failure(str(error)) from error
    finally:
        folder.close()


def _open_folder(plan: Plan) -> RunFolder:
    manifest = make_manifest(plan)
    date = datetime.date.today().isoformat()
    return RunFolder.open(plan.args.out or records.default_folder(date, "compare", manifest), manifest)


def _carry_out(plan: Plan, folder: RunFolder) -> int:
    run = Run(plan, folder, engines={}, records=list(folder.records))
    with refusing():
        params = plan.subject.load()  # has a progress bar of its own
    stopped: BaseException | None = None
    with Progress(total=len(plan.drafters) * len(plan.chosen)) as progress:
        try:
            _prepare(run, params, progress)
            for names in plan.batches():
                for drafter, undone in _turns(run, names, progress):
                    _decode(run, drafter, undone, progress)
            _measure_halves(run, progress)
        except (KeyboardInterrupt, NotFiniteError) as reason:
            stopped = reason
    summary = _summarize(run, complete=stopped is None)
    folder.write_summary(summary)
    if run.measured:
        table.print_table(summary["rows"], summary["title"])
        try:
            plots.draw(summary["rows"], summary["title"], folder.path / "compare.png")
        except OSError as error:
            raise folder.unwritable(error) from error
    return _say_goodbye(run, stopped)


def _prepare(run: Run, params: Params, progress: Progress) -> None:
    """Make every strategy's own weights, and account for its memory from shapes."""
    plan = run.plan
    for name, drafter in plan.drafters.items():
        progress.describe(f"{name}: preparing")
        with refusing():
            run.engines[name] = Engine(plan.subject.model, params, drafter, rule=plan.rule, offload=plan.args.offload)
    progress.describe("accounting for memory")
    capacity = max(plan.capacity(name) for name in plan.chosen)
    for name, engine in run.engines.items():
        account = memory.account(
            engine.program, engine.params, engine.drafter_params,
            batch=plan.args.batch_size, capacity=capacity, cache_dtype=engine.cache_dtype,
        )  # fmt: skip
        if engine.program.offload:
            account = offloaded_account(account)
        run.measured[name] = Measured(
            settings=repr(engine.program.drafter),
            label=engine.program.drafter.label,
            exact=engine.program.exact,
            added_bytes=account.added_bytes,
            peak_bytes=account.peak_bytes,
            offloaded_bytes=offload.size(engine.drafter_params) if engine.program.offload else None,
            fetch_s=offload.fetch_s(engine.drafter_params) if engine.program.offload else None,
        )


def _turns(run: Run, names: Sequence[str], progress: Progress) -> Iterator[tuple[str, list[str]]]:
    """Every drafter, in turn, with what it has not done of a batch."""
    done = {(record.drafter, record.question_id) for record in run.records if record.finish != "not_finite"}
    for drafter in run.engines:
        undone = [name for name in names if (drafter, name) not in done]
        progress.advance(len(names) - len(undone))
        if undone:
            yield drafter, undone


def _decode(run: Run, name: str, question_ids: list[str], progress: Progress) -> None:
    """Decode one batch with one drafter and put its records on disk."""
    plan, engine, batch = run.plan, run.engines[name], run.plan.batch(question_ids)
    if (name, batch.capacity) not in run.compiled:
        progress.describe(f"{name}: compiling for {batch.capacity} slots")
        _compile(run, name, batch)
    progress.describe(f"{name}: {question_ids[0]}")
    result = measure.decode_batch(engine, batch, plan.shared)
    for question_id, generation in zip(question_ids, result.generations, strict=True):
        record = Record(
            question_id=question_id,
            category=plan.chosen[question_id].category,
            drafter=name,
            prompt_tokens=len(plan.tokens[question_id]),
            capacity=batch.capacity,
            batch_rows=len(question_ids),
            session=run.session,
            finish=generation.finish,
            prefill_s=result.prefill_s,
            decode_s=result.decode_s,
            tokens=generation.tokens,
            text=plan.subject.tokenizer.decode(generation.tokens),
            counts=generation.counts,
        )
        run.folder.append(record)
        run.records.append(record)
        progress.advance(1)
    if result.error is not None:
        raise result.error


def _compile(run: Run, name: str, batch: measure.Batch) -> None:
    seconds, executable = measure.compile_batch(run.engines[name], batch, run.plan.shared)
    run.compiled.add((name, batch.capacity))
    known, found = run.measured[name], read_compiled(executable)
    run.measured[name] = dataclasses.replace(
        known,
        compile_s=(known.compile_s or 0) + seconds,
        compiler_bytes=found.total_bytes,  # capacities rise: the last one is the largest
        temp_bytes=found.temp_bytes,
    )


def _measure_halves(run: Run, progress: Progress) -> None:
    """Time drafting and verification apart, on the longest of the smallest capacity's prompts."""
    if run.plan.shared.max_new_tokens < 2:
        return
    progress.describe("timing drafting and verification")
    batch = run.plan.batch(run.plan.batches()[0])
    for name, (draft_s, verify_s) in measure.time_halves(run.engines, batch, run.plan.shared).items():
        run.measured[name] = dataclasses.replace(run.measured[name], draft_s=draft_s, verify_s=verify_s)


def _summarize(run: Run, complete: bool) -> dict[str, Any]:
    plan = run.plan
    rows = make_rows(run.measured, run.records, greedy=plan.greedy, seed=plan.args.seed)
    for row in rows:
        if complete and row["greedy_difference"] is not None:
            row["greedy_difference"]["margin"] = _margin(run, row["greedy_difference"])
    capacities = sorted({plan.capacity(name) for name in plan.chosen})
    name, args = plan.subject.checkpoint.name, plan.args
    title = (
        f"{name}, {plan.subject.dtype}, {len(plan.chosen)} of {len(plan.source.prompts)} prompts ({plan.source.name}), "
        f"up to {args.max_new_tokens} new tokens, temperature {args.temperature:g}, batch {args.batch_size}, "
        f"{' and '.join(map(str, capacities))} slots"
    )
    peak = device.peak_bytes()
    if peak is not None:
        title += f"; the device held {peak / 2**30:.2f} GiB at most, all strategies together (memory_stats)"
    return {"complete": complete, "title": title, "capacity": capacities[-1], "device_peak_bytes": peak, "rows": rows}


def _margin(run: Run, difference: dict[str, Any]) -> float | None:
    """The target's margin where a greedy output left the baseline: a near-tie, or a real fault?"""
    name = difference["question_id"]
    baseline = next(r for r in run.records if r.drafter == BASELINE and r.question_id == name)
    engine = run.engines[BASELINE]
    context = run.plan.tokens[name] + baseline.tokens[: difference["position"]]
    return measure.margin(engine.program.model, engine.params, context, engine.cache_dtype)


def _say_goodbye(run: Run, stopped: BaseException | None) -> int:
    done = len({(r.drafter, r.question_id) for r in run.records if r.finish != "not_finite"})
    kept = f"{done} of {len(run.plan.drafters) * len(run.plan.chosen)} results are kept in {run.folder.path}"
    if isinstance(stopped, NotFiniteError):
        bad = next(r for r in run.records if r.session == run.session and r.finish == "not_finite")
        raise Failure(f"{bad.drafter}, {bad.question_id}: {stopped}. {kept}") from stopped
    if stopped is not None:
        print(f"specjax: interrupted; {kept}: the same command with this --out goes on from there", file=sys.stderr)
        return 130
    print(f"{kept}: prompts.jsonl, manifest.json, summary.json, compare.png", file=sys.stderr)
    return 0
