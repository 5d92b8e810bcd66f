"""Carry a comparison out: the same prompts with every drafter, in turn, and each record kept as it comes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.engine import Engine, NotFiniteError
from specjax.evaluate import measure
from specjax.evaluate.comparison import Comparison
from specjax.evaluate.preparation import Task, prepare
from specjax.evaluate.progress import Lines, Silent
from specjax.evaluate.record import Record
from specjax.evaluate.result import Result
from specjax.evaluate.rows import BASELINE, Contender, make_rows, remake_rows
from specjax.evaluate.run_folder import RunFolder, record_store
from specjax.evaluate.store import Store, StoreError
from specjax.memory.compiler import read as read_compiled
from specjax.memory.measured_device import peak_bytes


def compare(comparison: Comparison, folder: str | Path | None = None, progress: type[Lines] | None = Lines) -> Result:
    """Decode every prompt with every drafter, and measure what each one costs.

    Ctrl-C, and logits that are not finite, end it early: `Result.stopped` says so beside what was done until then.

    Args:
      folder: keeps records as they come; the same comparison with the same folder goes on where it stopped, and one
        that is complete is read again. Without one, nothing is written.
      progress: says what is being done.

    Raises:
      ValueError: something does not fit together; nothing was decoded.
      StoreError: the folder holds something else, or can't be written.
    """
    task = prepare(comparison)
    if folder is None:
        return carry_out(task, None, progress or Silent)
    opened = RunFolder.open(Path(folder), task.manifest())
    try:
        return carry_out(task, opened, progress or Silent)
    finally:
        opened.close()


@dataclass
class Run:
    """A run under way: what was decoded and measured so far."""

    task: Task
    folder: RunFolder | None
    store: Store[Record]
    engines: dict[str, Engine] = field(default_factory=dict)
    session: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    contenders: dict[str, Contender] = field(default_factory=dict)
    compiled: set[tuple[str, int]] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # drafters whose code raised, and what: the others go on

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Leave a drafter out from here on if its own code fails."""
        try:
            yield
        except (StoreError, NotFiniteError):
            raise
        except Exception as error:
            if name == BASELINE:
                raise
            del self.engines[name]
            self.failed[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def keep(self, record: Record) -> None:
        """Keep a record, on disk where there is a folder."""
        (self.folder or self.store).append(record)


def carry_out(
    task: Task,
    folder: RunFolder | None,
    progress: Callable[[int], Lines],
    preparing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Result:
    """Decode what the folder lacks.

    Args:
      preparing: stands around the reading of weights and the making of drafters, whose errors are the user's.
    """
    if folder is not None and folder.summary is not None:
        return Result(task.comparison, _read_again(task, folder), tuple(folder.store.rows), task.total, folder.path)
    run = Run(task, folder, folder.store if folder else record_store())
    with preparing():
        task.target.params  # noqa: B018  read now, with a progress bar of their own
    stopped: KeyboardInterrupt | NotFiniteError | None = None
    with progress(task.total) as bar:
        try:
            with preparing():
                _make_engines(run, bar)
            bar.describe("accounting for memory")
            for name, engine in list(run.engines.items()):
                with run.attempt(name):
                    run.contenders[name] = Contender.of(engine, task.comparison.batch_size, max(task.capacities))
            for names in task.batches():
                for drafter, undone in _turns(run, names, bar):
                    with run.attempt(drafter):
                        _decode(run, drafter, undone, bar)
            _compile_rest(run, bar)
            _measure_halves(run, bar)
        except (KeyboardInterrupt, NotFiniteError) as reason:
            bar.stop()
            stopped = reason
    summary = _summarize(run, complete=stopped is None and not run.failed)
    if folder is not None:
        folder.write_summary(summary)
    return Result(task.comparison, summary, tuple(run.store.rows), task.total, folder.path if folder else None, stopped)


def _read_again(task: Task, folder: RunFolder) -> dict[str, Any]:
    """The summary of a run that is complete, its figures made anew from the records."""
    summary, file = dict(folder.summary or {}), folder.path / "summary.json"
    try:
        if [row["drafter"] for row in summary["rows"]] != list(task.drafters):
            raise ValueError("its rows are not the run's drafters")
        if len({key for key, record in folder.store.done.items() if record.usable}) != task.total:
            raise ValueError(f"it says complete, and prompts.jsonl has not all of {task.total} results")
        if not isinstance(summary["title"], str):
            raise ValueError("title is no text")
        greedy = task.comparison.temperature == 0
        rows = remake_rows(summary["rows"], folder.store.rows, greedy=greedy, seed=task.comparison.seed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise StoreError(f"{file} is damaged ({said}): remove it and repeat this command to go on") from error
    return summary | {"rows": json.loads(json.dumps(rows))}  # as a file has them


def _make_engines(run: Run, progress: Lines) -> None:
    """Make every strategy's own weights."""
    task = run.task
    for name, drafter in task.drafters.items():
        progress.describe(f"{name}: preparing")
        run.engines[name] = measure.make_engine(task.target, drafter, task.rule, task.comparison.offload)


def _turns(run: Run, names: Sequence[str], progress: Lines) -> Iterator[tuple[str, list[str]]]:
    """Every drafter, in turn, with what it has not done of a batch."""
    for drafter in list(run.engines):
        kept = {name: run.store.done.get((drafter, name)) for name in names}
        undone = [name for name, record in kept.items() if record is None or not record.usable]
        progress.advance(len(names) - len(undone))
        if undone:
            yield drafter, undone


def _decode(run: Run, name: str, question_ids: list[str], progress: Lines) -> None:
    """Decode one batch with one drafter and keep its records."""
    task, engine, batch = run.task, run.engines[name], run.task.batch(question_ids)
    if (name, batch.capacity) not in run.compiled:
        progress.describe(f"{name}: compiling for {batch.capacity} slots")
        _compile(run, name, batch)
    progress.describe(f"{name}: {question_ids[0]}")
    result = measure.decode_batch(engine, batch, task.shared)
    for question_id, generation in zip(question_ids, result.generations, strict=True):
        run.keep(
            Record(
                question_id=question_id,
                category=task.chosen[question_id].category,
                drafter=name,
                prompt_tokens=len(task.tokens[question_id]),
                capacity=batch.capacity,
                batch_rows=len(question_ids),
                session=run.session,
                finish=generation.finish,
                prefill_s=result.prefill_s,
                decode_s=result.decode_s,
                tokens=generation.tokens,
                text=generation.text or "",
                counts=generation.counts,
            )
        )
        progress.advance(1)
    if result.error is not None:
        raise result.error


def _compile(run: Run, name: str, batch: measure.Batch) -> None:
    seconds, executable = measure.compile_batch(run.engines[name], batch, run.task.shared)
    run.compiled.add((name, batch.capacity))
    known, found = run.contenders[name], read_compiled(executable)
    run.contenders[name] = dataclasses.replace(
        known,
        compile_s=(known.compile_s or 0) + seconds,
        compiler_bytes=_larger(known.compiler_bytes, found.total_bytes),
        temp_bytes=_larger(known.temp_bytes, found.temp_bytes),
    )


def _larger(known: int | None, found: int | None) -> int | None:
    return max((size for size in (known, found) if size is not None), default=None)


def _compile_rest(run: Run, progress: Lines) -> None:
    """What earlier sessions of this run decoded has been compiled in none of this one: its figures are due, too."""
    for question_ids in run.task.batches():
        batch = run.task.batch(question_ids)
        for name in list(run.engines):
            if (name, batch.capacity) not in run.compiled:
                progress.describe(f"{name}: compiling for {batch.capacity} slots, decoded before")
                with run.attempt(name):
                    _compile(run, name, batch)


def _measure_halves(run: Run, progress: Lines) -> None:
    """Time drafting and verification apart, and check drafts, on the longest of the smallest capacity's prompts."""
    if run.task.shared.max_new_tokens < 2:
        return
    progress.describe("timing drafting and verification, checking drafts")
    batch = run.task.batch(run.task.batches()[0])
    for name, halves in measure.take_halves(run.engines, batch, run.task.shared).items():
        run.contenders[name] = run.contenders[name].measured(**dataclasses.asdict(halves))


def _summarize(run: Run, complete: bool) -> dict[str, Any]:
    task, comparison = run.task, run.task.comparison
    failed = {
        name: Contender(settings=repr(task.drafters[name]), label=why, exact=None) for name, why in run.failed.items()
    }
    known = run.contenders | failed
    contenders = {name: known[name] for name in task.drafters if name in known}
    rows = make_rows(contenders, run.store.rows, greedy=comparison.temperature == 0, seed=comparison.seed)
    for row in rows:
        if complete and row["greedy_difference"] is not None:
            row["greedy_difference"]["margin"] = _margin(run, row["greedy_difference"])
    title = (
        f"{task.target.name}, {task.target.dtype}, {len(task.chosen)} of {len(task.source.prompts)} prompts "
        f"({task.source.name}), up to {comparison.max_new_tokens} new tokens, temperature {comparison.temperature:g}, "
        f"batch {comparison.batch_size}, {' and '.join(map(str, task.capacities))} slots"
    )
    peak = peak_bytes()
    if peak is not None:
        title += f"; the device held {peak / 2**30:.2f} GiB at most, all strategies together (memory_stats)"
    return {
        "complete": complete,
        "title": title,
        "capacity": task.capacities[-1],
        "device_peak_bytes": peak,
        "rows": rows,
    }


def _margin(run: Run, difference: dict[str, Any]) -> float | None:
    """The target's margin where a greedy output left the baseline: a near-tie, or a real fault?"""
    name = difference["question_id"]
    baseline = run.store.done[(BASELINE, name)]
    engine = run.engines[BASELINE]
    context = run.task.tokens[name] + baseline.tokens[: difference["position"]]
    return measure.margin(engine.program.model, engine.params, context, engine.cache_dtype)
