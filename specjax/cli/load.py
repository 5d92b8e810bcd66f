"""`specjax load runs/...`: early warnings and the fingerprints of load, from a run's own records."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.table import Table
from rich.text import Text

from specjax.cli.errors import refusing
from specjax.cli.table import make_console
from specjax.evaluate.under_load import diagnose
from specjax.memory import hardware


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("folder", type=Path, help="the folder of a run of `specjax compare`")
    parser.add_argument("--device", help=f"what it ran on: {', '.join(hardware.DEVICES)}, or this (measured now)")
    parser.add_argument(
        "--drafter", action="append", default=[], metavar="FILE.py:CLASS",
        help="a drafter of the run that is code or weights of a file, which is not opened otherwise; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what the records say, a drafter at a time."""
    with refusing():
        found = diagnose(args.folder, args.device, args.drafter)
    if args.json:
        print(json.dumps({name: dataclasses.asdict(diagnosis) for name, diagnosis in found.items()}, indent=1))
        return 0
    console = make_console()
    for name, diagnosis in found.items():
        shown = Table.grid(padding=(0, 2))
        for fingerprint in diagnosis.fingerprints:
            shown.add_row("", fingerprint.shown, fingerprint.name, fingerprint.text)
        console.print(Text(name, "bold"), *(f"  {warning}" for warning in diagnosis.warnings), shown, sep="\n")
    return 0
