"""The tables and lines of `specjax plan`: the ranking, the dial of windows, refusals, traffic and tiers."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from specjax.memory import hardware, planner, roofline, tiers
from specjax.memory.hardware import GB, GiB
from specjax.memory.jaxpr_traffic import PARTS, PHASES, Traffic
from specjax.memory.planner import PLAIN, Option, Question
from specjax.memory.strategy import preset

CONTEXTS, BATCHES = (1024, 4096, 16_384, 65_536), (1, 8, 32, 128)


def ranking(question: Question, ranked: list[Option]) -> Table:
    """The best window of each strategy, the best strategy first."""
    best = planner.best_of_each(ranked)
    plain = next(option for option in best if option.spec == PLAIN)
    bound = "" if question.latency_s is None else f", at most {question.latency_s * 1e3:g} ms a token"
    shown = Table(
        title=f"{question.target}, {question.dtype}, context {question.context}, on {question.layout.devices} x "
        f"{question.device.name}, {question.limit_bytes / GiB:.2f} GiB each{bound}: PREDICTED",
        caption=f"{roofline.FORMULA}, at the same batch",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("strategy", no_wrap=True)
    for name in ("K", "tokens a round", "pays above", "draft ms", "verify ms", "ms a token", "batch", "tokens/s",
                 "of none's", "speedup", "GiB", "batch that fits"):  # fmt: skip
        shown.add_column(name, justify="right")
    for option in best:
        found = option.prediction
        shown.add_row(
            option.spec, str(found.window) if found.window else "", f"{found.tokens:.2f}", f"{found.pays_above:.2f}",
            f"{found.time.draft_s * 1e3:.2f}", f"{found.time.verify_s * 1e3:.2f}", f"{found.latency_s * 1e3:.2f}",
            str(found.batch), f"{found.tokens_per_s:.0f}", f"{found.tokens_per_s / plain.prediction.tokens_per_s:.2f}",
            f"{found.speedup:.2f}", f"{option.needed_bytes / GiB:.2f}", str(option.largest_batch),
            style="dim" if option.refusal else None,
        )  # fmt: skip
    return shown


def dial(question: Question, ranked: list[Option]) -> Table:
    """Predicted speedup by window: what the user sets with open eyes."""
    by_key = {(option.spec, option.prediction.window): option for option in ranked}
    shown = Table(
        title="predicted speedup by window, against none at the same batch; - does not meet the bounds",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("strategy")
    for window in question.windows:
        shown.add_column(str(window), justify="right")
    for spec in question.growths:
        if spec != PLAIN and question.profile(spec) is not None:
            row = (by_key.get((spec, window)) for window in question.windows)
            shown.add_row(spec, *(_speedup(option) for option in row))
    return shown


def _speedup(option: Option | None) -> str:
    if option is None:  # the drafter has a window of its own
        return ""
    return "-" if option.refusal else f"{option.prediction.speedup:.2f}"


def assumptions(question: Question) -> list[str]:
    """What the predictions rest on."""
    lines = [
        f"rates: {question.device.source}{'' if question.device.name == hardware.HERE else ', peaks'}; "
        "times are lower bounds",
        "memory: "
        + (question.device.limit_source if question.limit_bytes == question.device.limit_bytes else "the budget given"),
    ]
    if question.layout.devices > 1:
        link = question.device.link_bytes_per_s
        lines.append(
            "between devices: two all-reduces a layer over "
            + (f"{link / 1e9:.0f} GB/s" if link else "links of unknown rate, not counted")
        )
    profiles = {spec: question.profile(spec) for spec in question.growths if spec != PLAIN}
    for source in dict.fromkeys(profile.source for profile in profiles.values() if profile):
        names = [spec for spec, profile in profiles.items() if profile and profile.source == source]
        lines.append(f"acceptance of {', '.join(names)}: {source}")
    for spec, profile in profiles.items():
        if profile and (note := profile.note(question.windows[-1])):
            lines.append(f"  {spec}: {note}")
    return lines


def refusals(question: Question, ranked: list[Option]) -> list[str]:
    """Why strategies are out, and what could give way."""
    lines = []
    for option in planner.best_of_each(ranked):
        if option.refusal:
            lines.append(f"{option.spec} {option.prediction.window or ''}".strip() + f": {option.refusal}")
            if question.profile(option.spec) is not None:
                ways = planner.ways_out(question, option.spec, option.prediction.window)
                lines += [f"    could give way: {way}" for way in ways]
    if all(option.refusal for option in ranked):
        lines.insert(0, "nothing meets the bounds:")
    return lines


def sizes_table(question: Question) -> Table:
    """How the best strategy changes with context and batch."""
    longest = preset(question.target).context_length
    contexts = (*(size for size in CONTEXTS if question.windows[-1] < size < longest), longest)
    batches = tuple(size * question.layout.data for size in BATCHES)
    shown = Table(
        title="largest predicted speedup by context and batch: strategy, window, speedup", box=box.SIMPLE_HEAD
    )
    shown.add_column("context")
    for batch in batches:
        shown.add_column(f"batch {batch}", justify="right")
    for context, row in zip(contexts, planner.ranking_by_size(question, contexts, batches), strict=True):
        shown.add_row(str(context), *row)
    return shown


def traffic_table(question: Question, options: Sequence[Option]) -> Table:
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


def tiers_table(question: Question, options: Sequence[Option]) -> Table:
    """What each strategy would ask of the links to slower tiers."""
    known = tiers.links(question.device)
    shown = Table(
        title="tiers, PREDICTED, one device: "
        + ", ".join(f"{name} at {rate / GB:g} GB/s" for name, rate in known.items()),
        caption="of the peak: what is brought back for a phase is held in it; queue, GB/s: rate in - rate out at full "
        "load; must stay: live window, probabilities, logits, target weights",
        box=box.SIMPLE_HEAD,
    )
    for column in ("strategy", "may leave"):
        shown.add_column(column, no_wrap=True)
    for column in ("frees GiB", "of the peak", "needs GB/s", *(f"queue, {name}" for name in known), "speedup, fetched"):
        shown.add_column(column, justify="right")
    for option in options:
        found = option.prediction
        account = question.growths[option.spec].account(found.batch, question.context, found.window)
        for move in tiers.moves(account, found, question.context):
            grows = (tiers.queue_growth(move.rate_bytes_per_s, rate) / GB for rate in known.values())
            fetched = ""
            if move.name.startswith("weights") and "host memory" in known:
                fetched = f"{tiers.offloaded(found, move.freed_bytes, known['host memory']).speedup:.2f}"
            shown.add_row(
                option.spec + (f" {found.window}" if option.spec != PLAIN else ""), move.name,
                f"{move.freed_bytes / GiB:.2f}", f"{move.peak_bytes / GiB:.2f}", f"{move.rate_bytes_per_s / GB:.2f}",
                *("none" if not growth else f"+{growth:.1f}" for growth in grows), fetched,
            )  # fmt: skip
    return shown
