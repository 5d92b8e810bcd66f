"""The bytes and operations of a round as a table: what each strategy reads, writes and computes, and its time."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from specjax.memory import roofline
from specjax.memory.jaxpr_traffic import PARTS, PHASES, Traffic
from specjax.memory.planner import Option, Question

GB = 1e9


def table(question: Question, options: Sequence[Option]) -> Table:
    """A column a strategy, at its predicted batch and window; a part that no strategy has is left out."""
    shown = Table(
        title="a round on one device, counted in the traced program: GB read + written, PREDICTED ms",
        caption="exchange goes over the links between devices; intensity: operations a byte of memory",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("")
    found: list[Traffic] = []
    for option in options:
        name = f"{option.spec} {option.prediction.window or ''}".strip()
        shown.add_column(f"{name}, batch {option.prediction.batch}", justify="right")
        growth = question.growths[option.spec]
        found.append(growth.traffic(option.prediction.batch, question.context, option.prediction.window))
    for phase in PHASES:
        for part in PARTS:
            if part == "rollback" and phase == "verify":
                shown.add_row("verify: rollback", *("0: a length is kept" for _ in found))
            elif any(traffic.bytes(phase, part) >= GB / 1e4 for traffic in found):
                shown.add_row(f"{phase}: {part}", *(_part(question, traffic, phase, part) for traffic in found))
        shown.add_row(f"{phase}: GFLOP", *(f"{traffic.flop(phase) / 1e9:.1f}" for traffic in found))
        shown.add_row(f"{phase}: intensity", *(f"{traffic.intensity(phase):.1f}" for traffic in found))
        bounds = (roofline.bound(traffic, phase, question.device) for traffic in found)
        shown.add_row(f"{phase}: bound by", *bounds, end_section=True)
    return shown


def _part(question: Question, traffic: Traffic, phase: str, part: str) -> str:
    size = traffic.bytes(phase, part)
    if not size:
        return "0"
    return f"{size / GB:.3f}, {roofline.part_s(traffic, phase, part, question.device) * 1e3:.2f} ms"
