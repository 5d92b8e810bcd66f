"""`specjax memory`: what each strategy holds on a device, by component and phase, and what fits beside it."""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from specjax import mesh as sharding
from specjax.cli import memory_plots as pictures
from specjax.cli import memory_tables as account_table
from specjax.cli.errors import refusing
from specjax.cli.progress import Progress
from specjax.cli.table import make_console
from specjax.memory import acceptance, hardware, sweep, worth
from specjax.memory.account import PHASES, Account
from specjax.memory.aot import LIBTPU_ARGS, Ahead, check_installed, compile_ahead, compile_here
from specjax.memory.growth import Growth
from specjax.memory.strategy import Strategy, preset


@dataclass(frozen=True)
class Column:
    """One strategy on one device of the mesh."""

    strategy: Strategy
    account: Account
    device: hardware.Device
    layout: sharding.Layout
    ahead: Ahead | None = None

    @functools.cached_property
    def growth(self) -> Growth:
        """The account at other sizes."""
        return Growth(self.strategy, self.layout)

    def summary(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        limit, strategy = self.device.limit_bytes, self.strategy
        added = sum(self.account.added_bytes.values())
        figures = self.ahead.figures if self.ahead else None
        return {
            **self.strategy.asdict(),
            "device": self.device.name,
            "devices": self.layout.devices,
            "components": {part.name: part.bytes for part in self.account.components},
            "phases": {phase: self.account.phase_bytes(phase) for phase in PHASES},
            "peak_phase": self.account.peak_phase,
            "peak_bytes": self.account.needed_bytes,
            "peak_bytes_all_devices": self.account.needed_bytes * self.layout.devices,
            "added_bytes": self.account.added_bytes,
            "added_per_sequence_bytes": added * self.layout.data // strategy.batch,
            "added_per_token_bytes": added * self.layout.data // (strategy.batch * strategy.context),
            "left_bytes": limit - self.account.needed_bytes,
            "largest_batch": self.growth.largest_batch(limit, strategy.context),
            "longest_context": self.growth.longest_context(limit, strategy.batch),
            "compiler_bytes": figures.total_bytes if figures else None,
            "compiler_refusal": self.ahead.refusal if self.ahead else None,
            "compiler_temporaries": dict(figures.temporaries) if figures else None,
            "device_peak_bytes": self.ahead.device_bytes if self.ahead else None,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax memory`."""
    parser.add_argument("--target", default="llama-3.1-8b", help="a preset; its weights need not exist")
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help="name, external:PRESET, or with fields as fp8:kv=own; may be repeated (default: ngram, early-exit, fp8)",
    )
    parser.add_argument("--device", default="h100", help=f"{', '.join(hardware.DEVICES)}, or this (measured now)")
    parser.add_argument("--mesh", default="1", help="chips, as 8 or 2x2x2")
    parser.add_argument(
        "--data", type=int, default=1, help="copies of the model in the mesh, each for a part of the rows"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192, help="cache slots a row")
    parser.add_argument("--window", type=int, default=0, help="drafted tokens a round (default: each drafter's own)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--compile", action="store_true", help="ask the device's compiler too (a minute a strategy)")
    parser.add_argument(
        "--acceptance", type=Path, metavar="FOLDER",
        help="join acceptance lengths that a run of `specjax compare` measured",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", nargs="+", default=[], metavar="AXIS=LOW..HIGH",
        help="curves over context and batch with their crossing points, as context=1k..128k batch=1..256",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="draw (PNG or SVG) what is printed: components by phase, or with --acceptance acceptance against memory, "
        "or with --sweep the curves, with their figures in a JSON file beside",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    with refusing():
        return _answer(args)


def _answer(args: argparse.Namespace) -> int:
    if args.device in hardware.DEVICES:  # nothing runs here: don't start a device, nor lock its compiler out
        jax.config.update("jax_platforms", "cpu")
    if args.sweep and (args.acceptance or args.compile):
        other = "--acceptance" if args.acceptance else "--compile"
        raise ValueError(f"{other} and --sweep are two questions: ask one at a time")
    if args.plot:
        pictures.check_path(args.plot)
    axes = sweep.parse(args.sweep, preset(args.target).context_length)
    run_ = acceptance.read_run(args.acceptance) if args.acceptance else {}
    columns = account_for(args)
    if axes:
        return _sweep(columns, axes, args)
    joined = worth.join([(column.strategy, column.account) for column in columns], run_) if run_ else []
    facts = [column.summary() for column in columns]
    if args.json:
        print(json.dumps({"strategies": facts, "acceptance": joined} if joined else facts, indent=1))
    else:
        console = make_console()
        console.print(account_table.table(facts, _title(columns[0]), columns[0].device))
        for column in columns:
            if column.ahead:
                console.print(f"{column.strategy.drafter}: {column.ahead}")
        if columns[0].ahead and args.device in LIBTPU_ARGS:
            console.print(f"compiled with, and to be run with, LIBTPU_INIT_ARGS={LIBTPU_ARGS[args.device]}")
        if joined:
            console.print(worth.table(joined), *worth.sources(joined, args.target), sep="\n")
    if args.plot and joined:
        pictures.pareto(joined, _title(columns[0]), args.plot)
    elif args.plot:
        accounts = {column.strategy.drafter: column.account for column in columns}
        pictures.bars(accounts, _title(columns[0]), args.plot)
    return 0


def _sweep(columns: list[Column], axes: list[sweep.Axis], args: argparse.Namespace) -> int:
    limit = columns[0].device.limit_bytes
    curves = [
        sweep.curve(column.growth, axis, column.strategy.batch, column.strategy.context, limit)
        for axis in axes
        for column in columns
    ]
    values = json.dumps([curve.as_json() for curve in curves], indent=1)
    if args.plot:
        pictures.curves(curves, limit, _title(columns[0]), args.plot)
        args.plot.with_suffix(".sweep.json").write_text(values + "\n")
    if args.json:
        print(values)
    else:
        make_console().print(sweep.table(curves, _title(columns[0])))
    return 0


def _title(column: Column) -> str:
    strategy = column.strategy
    return (
        f"{strategy.target}, batch {strategy.batch}, context {strategy.context}, {strategy.dtype}, "
        f"on {column.layout.devices} x {column.device.name}"
    )


def account_for(args: argparse.Namespace) -> list[Column]:
    """The accounts that the arguments ask for, `none` first.

    Raises:
      ValueError: an unknown device, target or drafter, a mesh or context that does not fit them.
      CompilerMissingError: `--compile` without the compiler.
    """
    device, layout = sharding.place(args.device, args.mesh, args.data, preset(args.target))
    if args.batch % args.data:
        raise ValueError(f"batch={args.batch}: must be a multiple of data={args.data}, so that rows can be split")
    if args.compile and device.name != hardware.HERE:
        check_installed(device)
    columns = []
    sizes = (args.batch, args.context)
    for name in dict.fromkeys(["none", *(args.drafter or ("ngram", "early-exit", "fp8"))]):
        window = args.window * (name != "none")
        strategy = Strategy(args.target, name, *sizes, window, args.dtype, platform=device.platform)
        columns.append(Column(strategy, strategy.account(layout.size), device, layout))
    return _compiled(columns, args) if args.compile else columns


def _compiled(columns: list[Column], args: argparse.Namespace) -> list[Column]:
    """The columns with what the device's compiler says, and the device, if it is this one."""
    found: dict[str, Ahead] = {}
    with Progress(len(columns)) as progress:
        for column in sorted(columns, key=lambda column: column.account.needed_bytes):
            strategy, device = column.strategy, column.device
            progress.describe(f"{strategy.drafter}: compiling for {device.name}")
            here = device.name == hardware.HERE
            found[strategy.drafter] = (
                compile_here(strategy) if here else compile_ahead(strategy, device, args.mesh, data=args.data)
            )
            progress.advance(1)
    return [replace(column, ahead=found[column.strategy.drafter]) for column in columns]


if __name__ == "__main__":
    own = argparse.ArgumentParser(prog="specjax memory")
    add_arguments(own)
    raise SystemExit(run(own.parse_args()))
