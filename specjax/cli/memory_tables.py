"""The tables of `specjax memory`: components by strategies, where curves cross, and acceptance beside memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specjax.memory import hardware
from specjax.memory.account import GROUPS
from specjax.memory.buffers import PHASES
from specjax.memory.hardware import GiB
from specjax.memory.sweep import Curve


def account_table(facts: Sequence[Mapping[str, Any]], title: str, device: hardware.Device) -> Table:
    """Components, phases and what is left, in GiB a device; a column a strategy, from its `summary()`."""
    devices = facts[0]["devices"]
    shown = Table(
        title=f"{title}: GiB on each device, from shapes",
        caption="a component that no strategy has is left out; phases hold weights, KV and state too; usable: "
        + device.limit_source,
    )
    shown.add_column("component")
    for fact in facts:
        shown.add_column(fact["drafter"], justify="right")
    names = dict.fromkeys(name for fact in facts for name, size in fact["components"].items() if size)
    for name in names:
        shown.add_row(name, *(_gib(fact["components"].get(name, 0)) for fact in facts))
    shown.add_section()
    for phase in PHASES:
        shown.add_row(f"in all: {phase}", *(_gib(fact["phases"][phase]) for fact in facts))
    shown.add_row("the most, in", *(fact["peak_phase"] for fact in facts))
    if devices > 1:
        every = (_gib(fact["peak_bytes_all_devices"]) for fact in facts)
        shown.add_row(f"the most, all {devices} devices", *every)
    shown.add_row(f"left of {_gib(device.limit_bytes)}", *(_left(fact["left_bytes"]) for fact in facts))
    shown.add_section()
    for group in GROUPS:
        shown.add_row(f"added: {group}", *(_gib(fact["added_bytes"][group]) for fact in facts))
    shown.add_row("added a sequence, MiB", *(f"{fact['added_per_sequence_bytes'] / 2**20:.1f}" for fact in facts))
    shown.add_row("added a token, KiB", *(f"{fact['added_per_token_bytes'] / 2**10:.2f}" for fact in facts))
    shown.add_section()
    for name in ("largest batch", "longest context"):
        sizes = [fact[name.replace(" ", "_")] for fact in facts]
        shown.add_row(name, *map(str, sizes))
        shown.add_row("  taken away from none's", *(_taken(size, sizes[0]) for size in sizes))
    if any(fact["compiler_refusal"] is not None for fact in facts):
        shown.add_section()
        shown.add_row("the compiler says", *(_compiler(fact) for fact in facts))
        shown.add_row("its difference", *(_difference(fact) for fact in facts))
        if any(fact["device_peak_bytes"] for fact in facts):
            shown.add_row("the device says", *(_known(fact["device_peak_bytes"]) for fact in facts))
    return shown


def _gib(size: int) -> str:
    return f"{size / GiB:.3f}" if size else "0"


def _taken(size: int, plain: int) -> str:
    return f"{1 - size / plain:.1%}" if plain and size < plain else "-"


def _known(size: int | None) -> str:
    return _gib(size) if size else "unknown"


def _left(size: int) -> str:
    return _gib(size) if size >= 0 else f"{_gib(size)} does not fit"


def _compiler(fact: Mapping[str, Any]) -> str:
    if fact["compiler_bytes"] is None:
        return "does not fit" if fact["compiler_refusal"] else "unknown"
    return _gib(fact["compiler_bytes"])


def _difference(fact: Mapping[str, Any]) -> str:
    return "" if fact["compiler_bytes"] is None else f"{fact['compiler_bytes'] / max(fact['phases'].values()) - 1:+.2%}"


def sweep_table(curves: Sequence[Curve], title: str) -> Table:
    """Where something changes, a strategy and axis a row."""
    names = list(dict.fromkeys(name for curve in curves for name in curve.crossings))
    shown = Table(title=title, caption="the smallest size at which it is so; -: not within the sweep")
    for name in ("strategy", "axis", *names):
        shown.add_column(name, justify="left" if name in ("strategy", "axis") else "right")
    for curve in curves:
        ends = f"{curve.axis} {curve.sizes[0]} to {curve.sizes[-1]}"
        found = (curve.crossings.get(name, "") for name in names)
        shown.add_row(curve.strategy, ends, *("-" if size is None else str(size) for size in found))
    return shown


def sources(rows: Sequence[Mapping[str, Any]], target: str) -> list[str]:
    """How each figure was measured, where that is not plain from the table."""
    return [
        f"{row['drafter']}: measured as {row['measured_as']}"
        + (f" on {row['measured_on']}, not on {target}" if row["measured_on"] != target else "")
        for row in rows
    ]


def joined_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The joined rows."""
    shown = Table(
        title="acceptance, measured, against memory, from shapes",
        caption="expected: tokens a round at this table's window, predicted as 1 + S_1 + ... + S_K from the run's "
        "rounds; best: none other has more acceptance for as little memory",
    )
    for name in ("strategy", "added GiB", "acceptance length", "95 % interval", "per added GiB", "expected", "best"):
        shown.add_column(name, justify="left" if name == "strategy" else "right")
    for row in rows:
        per = row["acceptance_length_per_added_gib"]
        shown.add_row(
            row["drafter"], f"{row['added_bytes'] / GiB:.3f}", f"{row['acceptance_length']:.2f}",
            "" if row["interval"] is None else "{:.2f} to {:.2f}".format(*row["interval"]),
            "nothing added" if per is None else f"{per:.2f}", f"{row['expected_at_window']:.2f} at {row['window']}",
            "*" if row["best"] else "",
        )  # fmt: skip
    return shown
