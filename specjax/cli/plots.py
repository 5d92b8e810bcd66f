"""Two pictures of a run: what acceptance costs in memory, and how it falls with the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import figures


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG of the rows of `summary.json`; rows without figures are left out."""
    figure, [[memory, positions]] = figures.new_figure(1, 2, (11, 4.8), title)
    for index, row in enumerate(rows):
        color, name = figures.color(index), row["drafter"]
        length, added = row["acceptance_length"], row["added_bytes"]
        if length is not None and added is not None:
            low, high = row["acceptance_length_interval"] or (length, length)
            error = [[max(0.0, length - low)], [max(0.0, high - length)]]
            mebibytes = sum(added.values()) / (1 << 20)
            memory.errorbar(mebibytes, length, yerr=error, fmt="o", color=color, capsize=3, label=name)
        if row["per_position"]:
            steps = range(1, len(row["per_position"]) + 1)
            positions.plot(steps, row["per_position"], marker="o", color=color)
    memory.set(xlabel="memory added to none (MiB)", ylabel="acceptance length, 95 % interval over prompts")
    memory.set_xscale("symlog", linthresh=1)
    figures.plain_numbers(memory.xaxis)
    memory.set_ylim(bottom=0.9)
    positions.set(xlabel="drafted position", ylabel="acceptance, of the rounds that reached it", ylim=(-0.02, 1.02))
    positions.xaxis.get_major_locator().set_params(integer=True)
    if memory.containers:
        figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=figures.DPI)
