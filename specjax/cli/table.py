"""The table: a column a strategy, a line a figure, from the rows of `summary.json` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

LABEL_WIDTH, COLUMN_WIDTH, PIPE_WIDTH = 32, 14, 120
UNKNOWN = "-"


def print_table(rows: Sequence[Row], title: str, console: Console | None = None) -> None:
    """Print all rows, in several tables where the terminal is narrow, and their notes."""
    console = console or make_console()
    fit = max(1, (console.width - LABEL_WIDTH) // (COLUMN_WIDTH + 3))
    console.print(Text(title, "bold"))
    for first in range(0, len(rows), fit):
        console.print(_table(rows[first : first + fit]))
    for row in rows:
        for note in row["notes"]:
            console.print(Text.assemble("  ", (row["drafter"], "bold"), f": {note}"))


def make_console(stderr: bool = False) -> Console:
    """As wide as the terminal; wide enough for five strategies where there is none."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", width=LABEL_WIDTH)
    for row in rows:
        table.add_column(Text(row["drafter"]), justify="right", width=COLUMN_WIDTH, overflow="fold")
    kinds = _kinds(rows)
    heading = [("acceptance length (speedup)", [""] * len(rows))]
    sections = [[(label, [show(row) for row in rows]) for label, show in section] for section in SECTIONS]
    for lines in [*sections, *([heading + kinds] if kinds else [])]:
        shown = [line for line in lines if any(cell != UNKNOWN for cell in line[1])]
        for index, (label, cells) in enumerate(shown):
            table.add_row(Text(label), *map(Text, cells), end_section=index == len(shown) - 1)
    return table


def _kinds(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Acceptance length, and speedup, of each kind of prompts."""

    def show(row: Row, kind: str) -> str:
        found = row["categories"].get(kind, {})
        if found.get("acceptance_length") is None:
            return UNKNOWN
        speedup = found.get("speedup")
        return f"{found['acceptance_length']:.2f}" + ("" if speedup is None else f" ({speedup:.2f} x)")

    kinds = list(dict.fromkeys(kind for row in rows for kind in row["categories"]))
    return [(f"  {kind}", [show(row, kind) for row in rows]) for kind in kinds] if len(kinds) > 1 else []


def _number(name: str, form: str = ".2f", scale: float = 1) -> Callable[[Row], str]:
    return lambda row: UNKNOWN if row.get(name) is None else format(row[name] * scale, form)


def _several(name: str, form: str = ".2f", separator: str = " ", scale: float = 1) -> Callable[[Row], str]:
    return lambda row: separator.join(format(value * scale, form) for value in row.get(name) or ()) or UNKNOWN


def _over_prompts(show: Callable[[Row], str]) -> Callable[[Row], str]:
    """Nothing where there is one prompt."""
    return lambda row: show(row) if row["prompts"] > 1 else UNKNOWN


def _bytes(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _added(group: str) -> Callable[[Row], str]:
    return lambda row: _bytes((row.get("added_bytes") or {}).get(group))


def _greedy(row: Row) -> str:
    equal = row.get("greedy_equal", "absent")
    if equal == "absent" or not row["rounds"]:
        return UNKNOWN
    if equal is None:
        return "n/a"
    if equal:
        return "yes"
    difference = row["greedy_difference"]
    margin = difference.get("margin")
    return "NO" if margin is None else f"NO (margin {margin:.1g})"


SECTIONS: tuple[tuple[tuple[str, Callable[[Row], str]], ...], ...] = (
    (
        ("acceptance length, pooled", _number("acceptance_length")),
        ("  95 % interval over prompts", _several("acceptance_length_interval", separator=" to ")),
        ("  p10 / p50 / p90 over prompts", _over_prompts(_several("acceptance_length_quantiles"))),
        ("  mean over prompts", _over_prompts(_number("acceptance_length_prompt_mean"))),
        ("acceptance rate", _number("acceptance_rate")),
        ("  by position, % of reached", _several("per_position", ".0f", " ", 100)),
        ("  by position, % of drafted", _several("per_position_marginal", ".0f", " ", 100)),
        ("  alpha, overlap of p and q", _number("overlap")),
        ("rounds / of these cut short", lambda row: f"{row['rounds']} / {row['cut_rounds']}"),
    ),
    (
        ("draft, ms a round", _number("draft_s", ".1f", 1e3)),
        ("verify, ms a round", _number("verify_s", ".1f", 1e3)),
        ("tokens/s", _number("tokens_per_second", ".1f")),
        ("speedup against none", _number("speedup")),
        ("  expected from the lines above", _number("estimated_speedup")),
        ("compile, s (in no other figure)", _number("compile_s", ".1f")),
    ),
    (
        ("HBM added by weights", _added("weights")),
        ("  by KV", _added("kv")),
        ("  by other state", _added("state")),
        ("  by buffers", _added("buffers")),
        ("held at once at verification", lambda row: _bytes(row.get("peak_bytes"))),
        ("  the compiler's own figure", lambda row: _bytes(row.get("compiler_bytes"))),
        ("  of it, temporaries", lambda row: _bytes(row.get("temp_bytes"))),
        ("offloaded to host memory", lambda row: _bytes(row.get("offloaded_bytes"))),
        ("  to bring in, ms", _number("fetch_s", ".1f", 1e3)),
    ),
    (
        ("greedy output equals none's", _greedy),
        ("exact", lambda row: "yes" if row["exact"] else "approximate"),
    ),
)
