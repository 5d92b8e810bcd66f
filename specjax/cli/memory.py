"""`specjax memory`: what each strategy holds on a device, by component and phase, and what fits beside it."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specjax.cli import memory_plots, memory_tables, place, sizes
from specjax.cli.errors import refusing
from specjax.cli.progress import Progress
from specjax.cli.table import make_console
from specjax.memory import acceptance, hardware, sweep
from specjax.memory.account import Account
from specjax.memory.aot import LIBTPU_ARGS, Ahead, check_installed, compile_ahead, compile_here
from specjax.memory.buffers import PHASES
from specjax.memory.growth import Growth
from specjax.memory.strategy import DRAFTERS, Strategy, preset
from specjax.mesh import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax memory`."""
    place.add_arguments(parser)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192, help="cache slots a row")
    parser.add_argument("--window", type=int, default=0, help="drafted tokens a round (default: each drafter's own)")
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
        place.stay_off_devices(args.device)
        if args.sweep and (args.acceptance or args.compile):
            other = "--acceptance" if args.acceptance else "--compile"
            raise ValueError(f"{other} and --sweep are two questions: ask one at a time")
        if args.plot:
            memory_plots.check_path(args.plot)
        axes = sizes.parse_axes(args.sweep, preset(args.target).context_length)
        measured = acceptance.read_run(args.acceptance) if args.acceptance else {}
        columns = account_columns(args)
        if axes:
            _print_sweep(columns, axes, args)
        else:
            _print_accounts(columns, measured, args)
    return 0


@dataclass(frozen=True)
class Column:
    """One strategy on one device of the mesh."""

    strategy: Strategy
    account: Account
    device: hardware.Device
    layout: Layout
    ahead: Ahead | None = None

    @functools.cached_property
    def growth(self) -> Growth:
        """The account at other sizes."""
        return Growth(self.strategy, self.layout)

    def summary(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        limit, strategy, account = self.device.limit_bytes, self.strategy, self.account
        added = sum(account.added_bytes.values())
        figures = self.ahead.figures if self.ahead else None
        return {
            **strategy.asdict(),
            "device": self.device.name,
            "devices": self.layout.devices,
            "components": {part.name: part.bytes for part in account.components},
            "phases": {phase: account.phase_bytes(phase) for phase in PHASES},
            "peak_phase": account.peak_phase,
            "peak_bytes": account.needed_bytes,
            "peak_bytes_all_devices": account.needed_bytes * self.layout.devices,
            "added_bytes": account.added_bytes,
            "added_per_sequence_bytes": added * self.layout.data // strategy.batch,
            "added_per_token_bytes": added * self.layout.data // (strategy.batch * strategy.context),
            "left_bytes": limit - account.needed_bytes,
            "largest_batch": self.growth.largest_batch(limit, strategy.context),
            "longest_context": self.growth.longest_context(limit, strategy.batch),
            "compiler_bytes": figures.total_bytes if figures else None,
            "compiler_refusal": self.ahead.refusal if self.ahead else None,
            "compiler_temporaries": dict(figures.temporaries) if figures else None,
            "device_peak_bytes": self.ahead.device_bytes if self.ahead else None,
        }


def account_columns(args: argparse.Namespace) -> list[Column]:
    """The accounts that the arguments ask for, `none` first.

    Raises:
      ValueError: an unknown device, target or drafter, a mesh or context that does not fit them.
      CompilerMissingError: `--compile` without the compiler.
    """
    device, layout = place.find(args, args.batch)
    if args.compile and device.name != hardware.HERE:
        check_installed(device)
    columns = []
    for name in dict.fromkeys(["none", *(args.drafters or DRAFTERS)]):
        window = args.window * (name != "none")
        strategy = Strategy(args.target, name, args.batch, args.context, window, args.dtype, platform=device.platform)
        columns.append(Column(strategy, strategy.account(layout), device, layout))
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


def _print_accounts(
    columns: Sequence[Column], measured: dict[str, acceptance.MeasuredAcceptance], args: argparse.Namespace
) -> None:
    joined = acceptance.join([(column.strategy, column.account) for column in columns], measured) if measured else []
    facts, title = [column.summary() for column in columns], _title(columns[0])
    if args.json:
        print(json.dumps({"strategies": facts, "acceptance": joined} if joined else facts, indent=1))
    else:
        console = make_console()
        console.print(memory_tables.account_table(facts, title, columns[0].device))
        for column in columns:
            if column.ahead:
                console.print(f"{column.strategy.drafter}: {column.ahead}")
        if args.compile and args.device in LIBTPU_ARGS:
            console.print(f"compiled with, and to be run with, LIBTPU_INIT_ARGS={LIBTPU_ARGS[args.device]}")
        if joined:
            console.print(memory_tables.joined_table(joined), *memory_tables.sources(joined, args.target), sep="\n")
    if args.plot and joined:
        memory_plots.pareto(joined, title, args.plot)
    elif args.plot:
        memory_plots.bars({column.strategy.drafter: column.account for column in columns}, title, args.plot)


def _print_sweep(columns: Sequence[Column], axes: Sequence[sweep.Axis], args: argparse.Namespace) -> None:
    limit, title = columns[0].device.limit_bytes, _title(columns[0])
    curves = [
        sweep.curve(column.growth, axis, column.strategy.batch, column.strategy.context, limit)
        for axis in axes
        for column in columns
    ]
    values = json.dumps([curve.as_json() for curve in curves], indent=1)
    if args.plot:
        memory_plots.curves(curves, limit, title, args.plot)
        args.plot.with_suffix(".sweep.json").write_text(values + "\n")
    if args.json:
        print(values)
    else:
        make_console().print(memory_tables.sweep_table(curves, title))


def _title(column: Column) -> str:
    strategy = column.strategy
    return (
        f"{strategy.target}, batch {strategy.batch}, context {strategy.context}, {strategy.dtype}, "
        f"on {column.layout.devices} x {column.device.name}"
    )
