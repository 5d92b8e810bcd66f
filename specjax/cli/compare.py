"""`specjax compare`: the same prompts with every drafter, in turn; one table, and a run folder as it goes."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax import measure, memory, prompts, provenance, records, verify
from specjax.cli import options, plots, table
from specjax.cli.errors import Failure, Refusal, refusing
from specjax.cli.progress import Progress
from specjax.drafter import Drafter
from specjax.engine import Engine, NotFiniteError, capacity_for
from specjax.memory.compiler import read as read_compiled
from specjax.records import Record, RunFolder, RunFolderError
from specjax.summary import BASELINE, Measured, make_rows

DRAFTERS = ("none", "ngram", "early-exit", "fp8", "external")
LIMIT = 7  # one prompt of each built-in kind
SMALLEST_CAPACITY = 512  # a compilation costs as much as several prompts, unused slots a few percent


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
        "--limit", type=options.positive, default=LIMIT,
        help="decode this many prompts, a fixed sample balanced over the kinds (default: %(default)s)",
    )  # fmt: skip
    amount.add_argument("--all", action="store_true", help="decode every prompt")
    parser.add_argument("--max-new-tokens", type=options.not_negative, default=64, help="default: %(default)s")
    parser.add_argument("--batch-size", type=options.positive, default=1, help="prompts decoded together (default: 1)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="run folder (default: runs/<date>-compare)")


@dataclass(frozen=True)
class Plan:
    """All that decides a run, checked; no weights are loaded yet."""

    subject: options.Subject
    drafters: dict[str, Drafter]
    rule: verify.Rule
    source: prompts.PromptSet
    chosen: dict[str, prompts.Prompt]  # by question_id
    tokens: dict[str, list[int]]
    shared: measure.Options
    args: argparse.Namespace

    @property
    def greedy(self) -> bool:
        """Whether outputs must be equal."""
        return bool(self.args.temperature == 0)

    def capacity(self, question_id: str) -> int:
        """Cache slots for a prompt and its answer: one of few sizes."""
        needed = len(self.tokens[question_id]) + self.shared.max_new_tokens
        return min(max(SMALLEST_CAPACITY, capacity_for(needed)), self.subject.model.context_length)

    def batches(self) -> list[list[str]]:
        """Prompts by capacity, then in the file's order, `--batch-size` together."""
        groups: dict[int, list[str]] = {}
        for name in self.chosen:
            groups.setdefault(self.capacity(name), []).append(name)
        size = self.args.batch_size
        return [group[i : i + size] for _, group in sorted(groups.items()) for i in range(0, len(group), size)]

    def batch(self, names: Sequence[str]) -> measure.Batch:
        """The batch of some prompts of equal capacity."""
        return measure.Batch(
            prompts=[self.tokens[name] for name in names],
            rows=[self.chosen[name].row for name in names],
            capacity=self.capacity(names[0]),
            size=self.args.batch_size,
        )


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


def make_plan(args: argparse.Namespace) -> Plan:
    """Check everything that can be checked before weights are read."""
    shared_sampler = options.make_sampling(args, args.batch_size)
    source = prompts.load(args.prompts) if args.prompts else prompts.builtin()
    chosen = prompts.select(source, args.category, None if args.all else args.limit)
    specs = list(dict.fromkeys([BASELINE, *(args.drafters or DRAFTERS)]))
    subject = options.open_subject(args)
    drafters = options.load_drafters(specs, args.settings, subject.model)
    tokens = {prompt.question_id: subject.encode(prompt.text, args.system) for prompt in chosen}
    context = subject.model.context_length
    long = [name for name, ids in tokens.items() if len(ids) + args.max_new_tokens > context]
    if long:
        raise ValueError(
            f"{len(long)} prompts with max_new_tokens={args.max_new_tokens} exceed the target's context of {context} "
            f"tokens, the first is {long[0]} of {len(tokens[long[0]])} tokens: lower --max-new-tokens, or leave "
            "these prompts out"
        )
    return Plan(
        subject=subject,
        drafters=drafters,
        rule=verify.RULES[args.rule](),
        source=source,
        chosen={prompt.question_id: prompt for prompt in chosen},
        tokens=tokens,
        shared=measure.Options(args.max_new_tokens, args.seed, subject.tokenizer.end_ids, shared_sampler),
        args=args,
    )


def make_manifest(plan: Plan) -> dict[str, Any]:
    """What the run's tokens depend on."""
    args, subject = plan.args, plan.subject
    return {
        "command": ["specjax", *sys.argv[1:]],
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "target": {
            "name": subject.checkpoint.name,
            "sha256": subject.checkpoint.sha256,
            "dtype": subject.dtype,
            "config": dataclasses.asdict(subject.checkpoint.config),
        },
        "drafters": {name: repr(drafter) for name, drafter in plan.drafters.items()},
        "drafter_files": {
            path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for path in (options.split(name)[0].partition(":")[0] for name in plan.drafters)
            if path.endswith(".py")
        },
        "rule": repr(plan.rule),
        "prompts": {"file": plan.source.name, "sha256": plan.source.sha256, "question_ids": list(plan.chosen)},
        "sampling": {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")},
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "system": args.system,
        "end_ids": list(plan.shared.end_ids),
        **provenance.describe(),
    }


def _open_folder(plan: Plan) -> RunFolder:
    manifest = make_manifest(plan)
    date = datetime.date.today().isoformat()
    return RunFolder.open(plan.args.out or records.default_folder(date, "compare", manifest), manifest)


def _carry_out(plan: Plan, folder: RunFolder) -> int:
    run = Run(plan, folder, engines={}, records=list(folder.records))
    stopped: BaseException | None = None
    with Progress(total=len(plan.drafters) * len(plan.chosen)) as progress:
        try:
            _load(run, progress)
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
        plots.draw(summary["rows"], summary["title"], folder.path / "compare.png")
    return _say_goodbye(run, stopped)


def _load(run: Run, progress: Progress) -> None:
    """Read the weights and make every strategy's own; account for its memory from shapes."""
    plan, progress_text = run.plan, progress.describe
    progress_text("loading the target")
    with refusing():
        params = plan.subject.load()
        for name, drafter in plan.drafters.items():
            progress_text(f"{name}: preparing")
            run.engines[name] = Engine(plan.subject.model, params, drafter, rule=plan.rule)
    capacity = max(plan.capacity(name) for name in plan.chosen)
    for name, engine in run.engines.items():
        account = memory.account(
            engine.program, engine.params, engine.drafter_params,
            batch=plan.args.batch_size, capacity=capacity, cache_dtype=engine.cache_dtype,
        )  # fmt: skip
        run.measured[name] = Measured(
            settings=repr(engine.program.drafter),
            label=engine.program.drafter.label,
            exact=engine.program.exact,
            added_bytes=account.added_bytes,
            peak_bytes=account.peak_bytes,
        )


def _turns(run: Run, names: Sequence[str], progress: Progress) -> Iterator[tuple[str, list[str]]]:
    """Every drafter with what it has not done of a batch; `none` and the others take turns to be first."""
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
        if row["greedy_difference"] is not None:
            row["greedy_difference"]["margin"] = _margin(run, row["greedy_difference"])
    capacities = sorted({plan.capacity(name) for name in plan.chosen})
    name, args = plan.subject.checkpoint.name, plan.args
    title = (
        f"{name}, {plan.subject.dtype}, {len(plan.chosen)} of {len(plan.source.prompts)} prompts ({plan.source.name}), "
        f"up to {args.max_new_tokens} new tokens, temperature {args.temperature:g}, batch {args.batch_size}, "
        f"{' and '.join(map(str, capacities))} slots"
    )
    return {"complete": complete, "title": title, "capacity": capacities[-1], "rows": rows}


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
        raise Failure(f"{run.records[-1].drafter}, {run.records[-1].question_id}: {stopped}. {kept}") from stopped
    if stopped is not None:
        print(f"specjax: interrupted; {kept}: the same command with this --out goes on from there", file=sys.stderr)
        return 130
    print(f"{kept}: prompts.jsonl, manifest.json, summary.json, compare.png", file=sys.stderr)
    return 0
