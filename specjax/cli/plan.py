"""`specjax plan`: which strategy and window to choose for a device, predicted, and what gives way."""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
from rich import box
from rich.table import Table

from specjax import mesh as sharding
from specjax.cli import plan_tables as traffic_table
from specjax.cli import sizes
from specjax.cli.errors import refusing
from specjax.cli.table import make_console
from specjax.memory import acceptance, hardware, planner, roofline, tiers
from specjax.memory.hardware import GiB
from specjax.memory.planner import Option, Question
from specjax.memory.strategy import FP8, preset

ASSUMED = 0.7
CONTEXTS, BATCHES = (1024, 4096, 16_384, 65_536), (1, 8, 32, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax plan`."""
    parser.add_argument("--target", default="llama-3.1-8b", help="a preset; its weights need not exist")
    parser.add_argument(
        "--drafter", action="append", metavar="NAME", dest="drafters",
        help="as for `specjax memory`; may be repeated (default: ngram, early-exit, fp8)",
    )  # fmt: skip
    parser.add_argument("--device", default="h100", help=f"{', '.join(hardware.DEVICES)}, or this (measured now)")
    parser.add_argument("--mesh", default="1", help="chips, as 8 or 2x2x2")
    parser.add_argument("--data", type=int, default=1, help="copies of the model in the mesh")
    parser.add_argument("--batch", default="", help="rows (default: as many as budget and latency allow)")
    parser.add_argument("--context", default="8k", help="cache slots a row (default: %(default)s)")
    parser.add_argument("--windows", default="1..8", help="drafted tokens a round to try (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", FP8))
    parser.add_argument("--budget", type=float, metavar="GIB", help="memory a device (default: all that is usable)")
    parser.add_argument("--latency", metavar="TIME", help="seconds a token of one row at most, as 30ms")
    parser.add_argument(
        "--acceptance", action="append", default=[], metavar="VALUE",
        help="a run folder of `specjax compare`, a probability a token, or DRAFTER=PROBABILITY; may be repeated "
        f"(without any, {ASSUMED} is assumed, and said so)",
    )  # fmt: skip
    parser.add_argument("--traffic", action="store_true", help="bytes and operations of a round, part by part")
    parser.add_argument("--tiers", action="store_true", help="which bytes may leave the device, and what that takes")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    with refusing():
        return _answer(args)


def _answer(args: argparse.Namespace) -> int:
    if args.device in hardware.DEVICES:  # nothing runs here: don't start a device
        jax.config.update("jax_platforms", "cpu")
    if args.json and (args.traffic or args.tiers):
        raise ValueError("--traffic and --tiers are printed as tables: leave them or --json out")
    question = ask(args)
    ranked = planner.options(question)
    if args.json:
        print(json.dumps(as_json(question, ranked), indent=1))
        return 0
    console = make_console()
    console.print(ranking(question, ranked))
    console.print(dial(question, ranked))
    for line in (*assumptions(question), *refusals(question, ranked)):
        console.print(line)
    console.print(sizes_table(question))
    if args.traffic:
        console.print(traffic_table.table(question, planner.best_of_each(ranked)))
    if args.tiers:
        console.print(tiers.table(question, planner.best_of_each(ranked)))
    return 0


def ask(args: argparse.Namespace) -> Question:
    """The checked question.

    Raises:
      ValueError: a device, target, drafter, size, range, latency or acceptance that makes no sense.
    """
    config = preset(args.target)
    device, layout = sharding.place(args.device, args.mesh, args.data, config)
    context, batch = sizes.parse_size(args.context), sizes.parse_size(args.batch) if args.batch else 0
    low, high = sizes.parse_range(args.windows)
    if context > config.context_length:
        raise ValueError(f"context of {context} tokens: must be 1 to {config.context_length}, the target's own")
    if high >= context:
        raise ValueError(f"window of {high}: does not fit into {context} cache slots")
    if batch % args.data:
        raise ValueError(f"batch={batch}: must be a multiple of data={args.data}, so that rows can be split")
    most = device.limit_bytes / GiB
    if args.budget is not None and not 0 < args.budget <= most:
        raise ValueError(f"budget of {args.budget:g} GiB: must be more than 0, at most {device.name}'s {most:.2f}")
    limit = device.limit_bytes if args.budget is None else int(args.budget * GiB)
    drafters = tuple(args.drafters or ("ngram", "early-exit", "fp8"))
    rates = acceptance.Acceptance.parse(args.acceptance, None if args.acceptance else ASSUMED)
    rates.check(drafters)
    return Question(
        target=args.target,
        drafters=drafters,
        device=device,
        layout=layout,
        acceptance=rates,
        context=context,
        batch=batch,
        windows=tuple(range(low, high + 1)),
        limit_bytes=limit,
        latency_s=sizes.parse_seconds(args.latency) if args.latency else None,
        dtype=args.dtype,
    )


def ranking(question: Question, ranked: list[Option]) -> Table:
    """The best window of each strategy, the best strategy first."""
    best = planner.best_of_each(ranked)
    plain = next(option for option in best if option.spec == planner.PLAIN)
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
        if spec != planner.PLAIN and question.profile(spec) is not None:
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
    profiles = {spec: question.profile(spec) for spec in question.growths if spec != planner.PLAIN}
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


def as_json(question: Question, ranked: list[Option]) -> dict[str, Any]:
    """Plain values."""
    return {
        "target": question.target,
        "device": question.device.name,
        "devices": question.layout.devices,
        "context": question.context,
        "limit_bytes": question.limit_bytes,
        "latency_s": question.latency_s,
        "predicted": roofline.FORMULA,
        "acceptance": {spec: acceptance.as_json(question.profile(spec)) for spec in question.growths},
        "options": [
            {
                "strategy": option.spec,
                "window": option.prediction.window,
                "batch": option.prediction.batch,
                "tokens_a_round": option.prediction.tokens,
                "pays_above": option.prediction.pays_above,
                "draft_s": option.prediction.time.draft_s,
                "verify_s": option.prediction.time.verify_s,
                "latency_s": option.prediction.latency_s,
                "tokens_per_s": option.prediction.tokens_per_s,
                "speedup": option.prediction.speedup,
                "needed_bytes": option.needed_bytes,
                "largest_batch": option.largest_batch,
                "refusal": option.refusal,
            }
            for option in ranked
        ],
    }
