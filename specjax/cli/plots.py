"""Two pictures of a run: what acceptance costs in memory, and how it falls with the position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of Okabe and Ito (2008): told apart by the colour-blind, too."""


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG of the rows of `summary.json`; rows without figures are left out."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # a dollar in a file's name is a dollar
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    memory, positions = figure.subplots(1, 2)
    for index, row in enumerate(rows):
        color, name = COLORS[index % len(COLORS)], row["drafter"]
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
    memory.xaxis.set_major_formatter("{x:g}")  # the default one writes formulas
    memory.set_ylim(bottom=0.9)
    positions.set(xlabel="drafted position", ylabel="acceptance, of the rounds that reached it", ylim=(-0.02, 1.02))
    positions.xaxis.get_major_locator().set_params(integer=True)
    if memory.containers:
        figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
