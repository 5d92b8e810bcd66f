"""`specjax load runs/...`: early warnings and the fingerprints of load, from a run's own records."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from specjax.cli.errors import refusing
from specjax.cli.table import make_console
from specjax.evaluate import under_load as load
from specjax.evaluate.run_folder import read_run
from specjax.memory import hardware, rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("folder", type=Path, help="the folder of a run of `specjax compare`")
    parser.add_argument("--device", help=f"what it ran on: {', '.join(hardware.DEVICES)}, or this (measured now)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what the records say, a drafter at a time."""
    with refusing():
        summary, manifest, records = read_run(args.folder)
        device = hardware.find(args.device) if args.device else None
    found = {}
    for row in summary["rows"]:
        own = [record for record in records if record.drafter == row["drafter"]]
        timed = min((record.capacity for record in records), default=summary.get("capacity", 0))
        achieved = rates.of_row(row, manifest, timed, device)
        found[row["drafter"]] = (load.trends(own), load.fingerprints(own, row, achieved))
    if args.json:
        print(json.dumps({name: _plain(*pair) for name, pair in found.items()}, indent=1))
        return 0
    console = make_console()
    for name, (trends, prints) in found.items():
        console.print(Text(name, "bold"), *_warnings(trends), _table(prints), sep="\n")
    return 0


def _warnings(trends: list[load.Trend]) -> list[str]:
    falling = [trend for trend in trends if trend.falling]
    if not trends:
        return [f"  falling acceptance: not observable: no request has {load.SHORTEST} whole rounds"]
    if not falling:
        return [
            f"  falling acceptance: none of {len(trends)} requests (Kendall's tau, Holm at {load.LEVEL:g}, and a fall "
            f"of {load.FALL:.0%} from the first half to the second)"
        ]
    return [
        f"  WARNING {trend.question_id}: {trend.first_half:.2f} tokens a round, then {trend.second_half:.2f} "
        f"(p = {trend.p_value:.1e}, {trend.rounds} rounds)"
        for trend in falling
    ]


def _table(prints: list[load.Fingerprint]) -> Table:
    shown = Table.grid(padding=(0, 2))
    for found in prints:
        seen = {True: "yes", False: "no", None: "?"}[found.seen]
        shown.add_row("", seen, found.name, found.text)
    return shown


def _plain(trends: list[load.Trend], prints: list[load.Fingerprint]) -> dict[str, Any]:
    return {
        "trends": [dataclasses.asdict(trend) for trend in trends],
        "fingerprints": [dataclasses.asdict(found) for found in prints],
    }
