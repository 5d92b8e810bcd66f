"""The accountant's pictures: the peak by phase, acceptance against memory, and curves over a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.memory.account import Account, Component
from specjax.memory.buffers import PHASES
from specjax.memory.hardware import GiB
from specjax.memory.sweep import Curve

SUFFIXES = (".png", ".svg")
_COLORS = [f"C{index}" for index in range(10)] + ["gold", "navy", "darkgreen", "salmon", "black", "lightblue", "plum"]


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
    figure, (whole, buffers) = _figure(2, (max(6.0, 1.9 * len(accounts) + 3), 6.0), sharex=True)
    names = list(dict.fromkeys(part.name for account in accounts.values() for part in account.components if part.bytes))
    colors = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
    places, labels = [], []
    for column, (spec, account) in enumerate(accounts.items()):
        for row, phase in enumerate(PHASES):
            x = column * (len(PHASES) + 1) + row
            places.append(x)
            labels.append(f"{phase}\n{spec}" if row == 1 else phase)
            parts = [part for part in account.components if phase in part.phases and part.bytes]
            _stack(whole, x, parts, colors)
            _stack(buffers, x, [part for part in parts if part.phases != PHASES], colors)
        at = PHASES.index(account.peak_phase) + column * (len(PHASES) + 1)
        whole.annotate(f"{account.needed_bytes / GiB:.2f}", (at, account.needed_bytes / GiB), ha="center", va="bottom")
    whole.set(ylabel="held at once, GiB", title=title)
    buffers.set(ylabel="of it, in one phase only, GiB")
    whole.margins(y=0.12)
    buffers.set_xticks(places, labels, fontsize=8)
    whole.tick_params(axis="x", length=0)
    handles = [whole.bar(0, 0, color=colors[name]) for name in reversed(names)]
    figure.legend(handles, list(reversed(names)), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=100)


def _stack(axes: Any, x: float, parts: Sequence[Component], colors: Mapping[str, Any]) -> None:
    bottom = 0.0
    for part in parts:
        axes.bar(x, part.bytes / GiB, 0.9, bottom, color=colors[part.name])
        bottom += part.bytes / GiB


def pareto(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Acceptance length against added memory; strategies that none beats in both are joined."""
    figure, (axes,) = _figure(1, (6.5, 4.5))
    for index, row in enumerate(rows):
        low, high = row["interval"] or (row["acceptance_length"],) * 2
        length, added = row["acceptance_length"], row["added_bytes"] / GiB
        error = [[max(0.0, length - low)], [max(0.0, high - length)]]
        axes.errorbar(added, length, yerr=error, fmt="o", color=f"C{index % 10}", capsize=3)
        axes.annotate(row["drafter"], (added, length), (6, 4), textcoords="offset points")
    best = sorted((row for row in rows if row["best"]), key=lambda row: row["added_bytes"])
    axes.plot([r["added_bytes"] / GiB for r in best], [r["acceptance_length"] for r in best], ":", color="gray")
    axes.set(xlabel="memory added to none, GiB", ylabel="acceptance length, 95 % interval", title=title)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_ylim(bottom=0.9)
    axes.margins(x=0.15)
    figure.savefig(path, dpi=110)


def curves(found: Sequence[Curve], limit_bytes: int, title: str, path: Path) -> None:
    """Needed bytes along each axis, with the crossing points marked."""
    axes_names = list(dict.fromkeys(curve.axis for curve in found))
    figure, panels = _figure(len(axes_names), (7.5, 3.6 * len(axes_names) + 0.6))
    marks = {"KV outgrows the target's weights": "o", "drafter weights stop mattering": "s", "no longer fits": "x",
             "KV outgrows the drafter's weights": "^"}  # fmt: skip
    for panel, name in zip(panels, axes_names, strict=True):
        for index, curve in enumerate(c for c in found if c.axis == name):
            color = f"C{index % 10}"
            needed = [size / GiB for size in curve.needed_bytes]
            panel.plot(curve.sizes, needed, color=color, label=curve.strategy)
            for crossing, size in curve.crossings.items():
                if size is not None:
                    panel.plot(size, np.interp(size, curve.sizes, needed), marks[crossing], color=color, markersize=6)
        panel.axhline(limit_bytes / GiB, color="black", linewidth=0.8, linestyle="--", label="usable")
        panel.set_xscale("log", base=2)
        panel.set(xlabel=name, ylabel="needed, GiB a device")
        for crossing, mark in marks.items():
            panel.plot([], [], mark, color="gray", label=crossing)
        panel.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _figure(rows: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
