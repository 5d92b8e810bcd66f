"""The table: a column a strategy, a line a figure, from the rows of `summary.json` alone; here as plain data and text.

How wide it is and what it looks like is up to what shows it: a terminal (`cli/table`), a notebook, or `repr`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Line = tuple[str, list[str]]
"""A label, and a cell a strategy."""

UNKNOWN = "-"


def sections(rows: Sequence[Row]) -> list[list[Line]]:
    """Lines that belong together; one where no strategy has a figure is left out."""
    kinds = _kinds(rows)
    heading: Line = ("acceptance length (speedup)", [""] * len(rows))
    found = [[(label, [show(row) for row in rows]) for label, show in section] for section in SECTIONS]
    found += [[heading, *kinds]] if kinds else []
    return [[line for line in lines if any(cell != UNKNOWN for cell in line[1])] for lines in found]


def acceptance(row: Row) -> list[Line]:
    """The first section, of one row: all of it follows from counts."""
    return [(label, [cell]) for label, show in SECTIONS[0] if (cell := show(row)) != UNKNOWN]


def notes(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What a reader must know of a strategy, beside its figures."""
    return [(row["drafter"], note) for row in rows for note in row["notes"]]


def as_text(rows: Sequence[Row], title: str) -> str:
    """In columns as wide as they need be."""
    lines = [("", [row["drafter"] for row in rows]), *(line for section in sections(rows) for line in section)]
    widths = [max(len(cell) for cell in column) for column in zip(*(cells for _, cells in lines), strict=True)]
    left = max(len(label) for label, _ in lines)
    shown = [
        "  ".join([label.ljust(left), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))]).rstrip()
        for label, cells in lines
    ]
    return "\n".join([title, "", *shown, *(f"  {name}: {note}" for name, note in notes(rows))])


def as_html(head: Sequence[str], lines: Sequence[Line], title: str = "", below: Sequence[str] = ()) -> str:
    """For a notebook: labels to the left, figures to the right."""
    left, right = 'style="text-align:left;white-space:pre"', 'style="text-align:right"'
    body = [("<th></th>", "".join(f"<th {right}>{html.escape(name)}</th>" for name in head))]
    body += [
        (f"<td {left}>{html.escape(label)}</td>", "".join(f"<td {right}>{html.escape(cell)}</td>" for cell in cells))
        for label, cells in lines
    ]
    rows = "".join(f"<tr>{label}{cells}</tr>" for label, cells in body)
    around = [f"<p>{html.escape(text)}</p>" if text else "" for text in (title, *below)]
    return f"{around[0]}<table>{rows}</table>{''.join(around[1:])}"


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


def _exact(row: Mapping[str, Any]) -> str:
    if row["exact"] is None:
        return "failed"
    if row["fault"]:
        return "no"
    return "approximate" if not row["exact"] else "yes" if row["checked"] else "by its rule alone"


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
        ("exact: rule proven, drafts checked", _exact),
    ),
)
