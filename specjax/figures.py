"""One style for every picture: colours that the colour-blind tell apart, plain numbers, no text read as a formula."""

from __future__ import annotations

from typing import Any

COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
"""Of Okabe and Ito (2008), and a gray."""
HATCHES = ("", "///", "...")
"""Where there are more things than colours."""
SMALL = 8
DPI = 130


def new_figure(rows: int, columns: int, size: tuple[float, float], title: str, **options: Any) -> tuple[Any, Any]:
    """A figure with a title, and its axes as an array `[rows, columns]`; save it with `save`."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # a dollar in a file's name is a dollar
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=SMALL + 2)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(True, color="#E5E5E5", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=SMALL)
    return figure, axes


def color(index: int) -> str:
    """The colour of the thing of that number."""
    return COLORS[index % len(COLORS)]


def hatch(index: int) -> str:
    """Tells things of the same colour apart."""
    return HATCHES[index // len(COLORS) % len(HATCHES)]


def plain_numbers(axis: Any) -> None:
    """Numbers as people write them, on an axis whose scale would write powers."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")
