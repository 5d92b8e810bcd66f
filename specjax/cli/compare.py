"""`specjax compare`: the same prompts with every drafter, in turn; one table, and a run folder as it goes."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from pathlib import Path

from specjax import offload
from specjax.cli import options, plots, table
from specjax.cli.errors import Failure, Refusal, refusing
from specjax.cli.progress import Progress
from specjax.engine import NotFiniteError
from specjax.evaluate import running
from specjax.evaluate.comparison import DRAFTERS, Comparison
from specjax.evaluate.preparation import SMALLEST_CAPACITY, Task, prepare
from specjax.evaluate.result import Result
from specjax.evaluate.rows import BASELINE
from specjax.evaluate.run_folder import RunFolder, default_folder, unwritable
from specjax.evaluate.store import StoreError

PICTURE = "compare.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    options.add_model_arguments(parser)
    parser.add_argument(
        "--drafter", action="append", metavar="NAME", dest="drafters",
        help="a name or ./file.py:Class, with settings as NAME:FIELD=VALUE,...; may be repeated; `none` is always run "
        f"(default: {', '.join((BASELINE, *DRAFTERS))})",
    )  # fmt: skip
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines in Spec-Bench's form (default: the built-in set)")
    parser.add_argument(
        "--category", action="append", default=[], dest="categories", help="only prompts of this kind; may be repeated"
    )
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


def comparison(args: argparse.Namespace) -> Comparison:
    """What the arguments ask for."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Comparison)}
    drafters = options.load_drafters([BASELINE, *(args.drafters or DRAFTERS)], args.settings)
    return Comparison(**given | {"drafters": drafters})


def run(args: argparse.Namespace) -> int:
    """Decode, print the table, write the folder; returns the exit code."""
    with refusing():
        task = prepare(comparison(args))
    try:
        folder = _open_folder(task, args.out)
    except StoreError as error:
        raise Refusal(str(error)) from error
    try:
        result = running.carry_out(task, folder, Progress, preparing=refusing)
        if folder.summary is not None:
            print(f"{folder.path} is complete; this is its table. Choose another --out to run again.", file=sys.stderr)
            table.print_table(result.rows, result.title)
            if not (folder.path / PICTURE).exists():  # killed between the two
                plots.draw(result.rows, result.title, folder.path / PICTURE)
            return 0
        return _show(result, folder.path)
    except StoreError as error:
        raise Failure(str(error)) from error
    finally:
        folder.close()


def _open_folder(task: Task, out: Path | None) -> RunFolder:
    manifest = {"command": ["specjax", *sys.argv[1:]]} | task.manifest()
    date = datetime.date.today().isoformat()
    return RunFolder.open(out or default_folder(date, "compare", manifest), manifest)


def _show(result: Result, folder: Path) -> int:
    if result.rows:
        table.print_table(result.rows, result.title)
        try:
            plots.draw(result.rows, result.title, folder / PICTURE)
        except OSError as error:
            raise unwritable(folder, error) from error
    return _say_goodbye(result, folder)


def _say_goodbye(result: Result, folder: Path) -> int:
    kept = f"{result.done} of {result.total} results are kept in {folder}"
    if isinstance(result.stopped, NotFiniteError):
        now = result.records[-1].session
        bad = next(record for record in result.records if record.session == now and not record.usable)
        raise Failure(f"{bad.drafter}, {bad.question_id}: {result.stopped}. {kept}") from result.stopped
    if result.stopped is not None:
        print(f"specjax: interrupted; {kept}: the same command with this --out goes on from there", file=sys.stderr)
        return 130
    if result.failed:
        why = "; ".join(f"{row['drafter']} {row['label']}" for row in result.rows if row["drafter"] in result.failed)
        raise Failure(f"{why}. {kept}: mend it, and the same command with this --out goes on")
    print(f"{kept}: prompts.jsonl, manifest.json, summary.json, compare.png", file=sys.stderr)
    return 0
