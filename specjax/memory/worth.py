"""What memory buys: measured acceptance lengths beside the bytes that each strategy adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from specjax.memory.acceptance import Measured, match
from specjax.memory.account import Account
from specjax.memory.hardware import GiB
from specjax.memory.strategy import Strategy


def join(accounts: Sequence[tuple[Strategy, Account]], run: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """One row a strategy that the run measured; `best`: no other one has more acceptance for as little memory.

    Raises:
      ValueError: a run that measured none of the strategies.
    """
    rows = []
    for strategy, account in accounts:
        drafter = strategy.shapes()[0].drafter
        if measured := match(strategy.drafter, drafter, run):
            added = sum(account.added_bytes.values())
            rows.append({
                "drafter": strategy.drafter,
                "added_bytes": added,
                "acceptance_length": measured.acceptance_length,
                "interval": measured.interval,
                "acceptance_length_per_added_gib": measured.acceptance_length / (added / GiB) if added else None,
                "expected_at_window": measured.profile.expected_tokens(drafter.num_speculative_tokens),
                "window": drafter.num_speculative_tokens,
                "measured_on": measured.target,
                "measured_as": measured.settings,
            })  # fmt: skip
    if not rows:
        names = ", ".join(strategy.drafter for strategy, _ in accounts)
        raise ValueError(f"the run measured none of {names}: it has {', '.join(run)}")
    for row in rows:
        row["best"] = not any(_beats(other, row) for other in rows)
    return rows


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pair = (one["acceptance_length"], -one["added_bytes"]), (other["acceptance_length"], -other["added_bytes"])
    return pair[0] != pair[1] and all(a >= b for a, b in zip(*pair, strict=True))


def sources(rows: Sequence[Mapping[str, Any]], target: str) -> list[str]:
    """How each figure was measured, where that is not plain from the table."""
    return [
        f"{row['drafter']}: measured as {row['measured_as']}"
        + (f" on {row['measured_on']}, not on {target}" if row["measured_on"] != target else "")
        for row in rows
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
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
