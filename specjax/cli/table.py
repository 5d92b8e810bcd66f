"""The table of a comparison on a terminal: several below each other where it is narrow."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.evaluate.table import Row, notes, sections

LABEL_WIDTH, COLUMN_WIDTH, PIPE_WIDTH = 32, 14, 120


def print_table(rows: Sequence[Row], title: str, console: Console | None = None) -> None:
    """Print all rows, in several tables where the terminal is narrow, and their notes."""
    console = console or make_console()
    fit = max(1, (console.width - LABEL_WIDTH) // (COLUMN_WIDTH + 3))
    console.print(Text(title, "bold"))
    for first in range(0, len(rows), fit):
        console.print(_table(rows[first : first + fit]))
    for name, note in notes(rows):
        console.print(Text.assemble("  ", (name, "bold"), f": {note}"))


def make_console(stderr: bool = False) -> Console:
    """As wide as the terminal; wide enough for five strategies where there is none."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", width=LABEL_WIDTH)
    for row in rows:
        table.add_column(Text(row["drafter"]), justify="right", width=COLUMN_WIDTH, overflow="fold")
    for lines in sections(rows):
        for index, (label, cells) in enumerate(lines):
            table.add_row(Text(label), *map(Text, cells), end_section=index == len(lines) - 1)
    return table
