"""The accountant's pictures: the peak by phase, acceptance against memory, and curves over a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax import figures
from specjax.memory.account import Account, Component
from specjax.memory.buffers import PHASES
from specjax.memory.hardware import GiB
from specjax.memory.sweep import Curve

SUFFIXES = (".png", ".svg")


def check_path(path: Path) -> Path:
    """Refuse what can't be drawn before anything is computed.

    Raises:
      ValueError: another kind of file, or a folder that is not there.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"picture {path}: must end with {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ValueError(f"picture {path}: there is no folder {path.parent}")
    return path


def bars(accounts: Mapping[str, Account], title: str, path: Path) -> None:
    """Components stacked by phase and strategy: all that is held, and below it only what one phase holds."""
    size = max(7.0, 2.1 * len(accounts) + 3.5), 6.5
    figure, [[whole], [buffers]] = figures.new_figure(2, 1, size, title, sharex=True)
    names = list(
        dict.fromkeys(
            part.name
            for account in accounts.values()
            for part in account.components
            if part.bytes and not set(PHASES).isdisjoint(part.phases)
        )
    )
    looks = {
        name: {"facecolor": figures.color(i + 1), "hatch": figures.hatch(i), "edgecolor": "white", "linewidth": 0.4}
        for i, name in enumerate(names)
    }
    places, labels = [], []
    for column, (spec, account) in enumerate(accounts.items()):
        for row, phase in enumerate(PHASES):
            x = column * (len(PHASES) + 1) + row
            places.append(x)
            labels.append(f"{phase}\n\n{spec}" if row == 1 else phase)
            parts = [part for part in account.components if phase in part.phases and part.bytes]
            _stack(whole, x, parts, looks)
            _stack(buffers, x, [part for part in parts if part.phases != PHASES], looks)
        at = PHASES.index(account.peak_phase) + column * (len(PHASES) + 1)
        text = f"{account.needed_bytes / GiB:.2f}"
        whole.annotate(text, (at, account.needed_bytes / GiB), ha="center", va="bottom", fontsize=figures.SMALL)
    whole.set(ylabel="held at once, GiB")
    buffers.set(ylabel="of it, in one phase only, GiB")
    whole.margins(y=0.12)
    for panel in (whole, buffers):
        panel.grid(False, axis="x")
    buffers.set_xticks(places, labels, fontsize=figures.SMALL - 1)
    whole.tick_params(axis="x", length=0)
    handles = [whole.bar(0, 0, **looks[name]) for name in reversed(names)]
    figure.legend(handles, list(reversed(names)), loc="outside right upper", fontsize=figures.SMALL, handleheight=1.6)
    figure.savefig(path, dpi=figures.DPI)


def _stack(axes: Any, x: float, parts: Sequence[Component], looks: Mapping[str, Any]) -> None:
    bottom = 0.0
    for part in parts:
        axes.bar(x, part.bytes / GiB, 0.9, bottom, **looks[part.name])
        bottom += part.bytes / GiB


def pareto(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Acceptance length against added memory; strategies that none beats in both are joined."""
    figure, [[axes]] = figures.new_figure(1, 1, (7.0, 5.0), title)
    best = sorted((row for row in rows if row["best"]), key=lambda row: row["added_bytes"])
    axes.plot([r["added_bytes"] / GiB for r in best], [r["acceptance_length"] for r in best], ":", color="gray")
    for index, row in enumerate(rows):
        low, high = row["interval"] or (row["acceptance_length"],) * 2
        length, added = row["acceptance_length"], row["added_bytes"] / GiB
        error = [[max(0.0, length - low)], [max(0.0, high - length)]]
        axes.errorbar(added, length, yerr=error, fmt="o", color=figures.color(index), capsize=3, label=row["drafter"])
    axes.set(xlabel="memory added to none, GiB", ylabel="acceptance length, 95 % interval")
    axes.set_xscale("symlog", linthresh=0.01)
    figures.plain_numbers(axes.xaxis)
    axes.set_ylim(bottom=0.9)
    axes.margins(x=0.1)
    figure.legend(loc="outside lower center", ncols=3, fontsize=figures.SMALL)
    figure.savefig(path, dpi=figures.DPI)


MARKS = {
    "KV outgrows the target's weights": "o", "drafter weights stop mattering": "s", "no longer fits": "X",
    "KV outgrows the drafter's weights": "^",
}  # fmt: skip


def curves(found: Sequence[Curve], limit_bytes: int, title: str, path: Path) -> None:
    """Needed bytes along each axis, with the crossing points marked."""
    axes_names = list(dict.fromkeys(curve.axis for curve in found))
    figure, panels = figures.new_figure(len(axes_names), 1, (8.0, 3.6 * len(axes_names) + 1.0), title)
    strategies = list(dict.fromkeys(curve.strategy for curve in found))
    lines: dict[str, Any] = {}
    for panel, name in zip(panels.flat, axes_names, strict=True):
        for curve in (c for c in found if c.axis == name):
            color = figures.color(strategies.index(curve.strategy))
            needed = [size / GiB for size in curve.needed_bytes]
            [lines[curve.strategy]] = panel.plot(curve.sizes, needed, color=color)
            for crossing, size in curve.crossings.items():
                if size is not None:
                    panel.plot(size, np.interp(size, curve.sizes, needed), MARKS[crossing], color=color, markersize=6)
        lines["usable"] = panel.axhline(limit_bytes / GiB, color="black", linewidth=0.8, linestyle="--")
        panel.set_xscale("log", base=2)
        figures.plain_numbers(panel.xaxis)
        panel.set(xlabel=name, ylabel="needed, GiB a device")
    for crossing, mark in MARKS.items():
        [lines[crossing]] = panels.flat[0].plot([], [], mark, color="gray")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, fontsize=figures.SMALL)
    figure.savefig(path, dpi=figures.DPI)
