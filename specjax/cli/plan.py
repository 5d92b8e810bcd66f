"""`specjax plan`: which strategy and window to choose for a device, predicted, and what gives way."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specjax.cli import place, plan_tables, sizes
from specjax.cli.errors import refusing
from specjax.cli.table import make_console
from specjax.memory import acceptance, planner, roofline
from specjax.memory.hardware import GiB
from specjax.memory.planner import Option, Question
from specjax.memory.strategy import DRAFTERS, FP8, preset

ASSUMED = 0.7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax plan`."""
    place.add_arguments(parser, (*place.DTYPES, FP8))
    parser.add_argument("--batch", default="", help="rows (default: as many as budget and latency allow)")
    parser.add_argument("--context", default="8k", help="cache slots a row (default: %(default)s)")
    parser.add_argument("--windows", default="1..8", help="drafted tokens a round to try (default: %(default)s)")
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
        place.stay_off_devices(args.device)
        if args.json and (args.traffic or args.tiers):
            raise ValueError("--traffic and --tiers are printed as tables: leave them or --json out")
        question = ask(args)
        ranked = planner.options(question)
        if args.json:
            print(json.dumps(as_json(question, ranked), indent=1))
            return 0
        console, best = make_console(), planner.best_of_each(ranked)
        console.print(plan_tables.ranking(question, ranked))
        console.print(plan_tables.dial(question, ranked))
        for line in (*plan_tables.assumptions(question), *plan_tables.refusals(question, ranked)):
            console.print(line)
        console.print(plan_tables.sizes_table(question))
        if args.traffic:
            console.print(plan_tables.traffic_table(question, best))
        if args.tiers:
            console.print(plan_tables.tiers_table(question, best))
    return 0


def ask(args: argparse.Namespace) -> Question:
    """The checked question.

    Raises:
      ValueError: a device, target, drafter, size, range, latency or acceptance that makes no sense.
    """
    longest = preset(args.target).context_length
    context, batch = sizes.parse_size(args.context), sizes.parse_size(args.batch) if args.batch else 0
    device, layout = place.find(args, batch)
    low, high = sizes.parse_range(args.windows)
    if context > longest:
        raise ValueError(f"context of {context} tokens: must be 1 to {longest}, the target's own")
    if high >= context:
        raise ValueError(f"window of {high}: does not fit into {context} cache slots")
    most = device.limit_bytes / GiB
    if args.budget is not None and not 0 < args.budget <= most:
        raise ValueError(f"budget of {args.budget:g} GiB: must be more than 0, at most {device.name}'s {most:.2f}")
    drafters = tuple(args.drafters or DRAFTERS)
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
        limit_bytes=device.limit_bytes if args.budget is None else int(args.budget * GiB),
        latency_s=sizes.parse_seconds(args.latency) if args.latency else None,
        dtype=args.dtype,
    )


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
