"""`specjax exactness`: the verdict on a drafter and a rule, printed, with JSON and a picture on request."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from specjax import plugins, verify
from specjax.exactness import lab, large
from specjax.exactness.report import FAIL, INCONCLUSIVE, PASS
from specjax.exactness.sampler import Setting

HELP = "test whether a drafter and a rule keep the target's law: PASS, FAIL or INCONCLUSIVE"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 2}  # an approximate rule is not an error: 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--drafter", help="a name (ngram) or ./file.py:Class; by default the chosen instances' own")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the drafter, e.g. exit_layer=1"
    )
    parser.add_argument("--rule", default="token", help=f"{', '.join(verify.RULES)}, or ./file.py:Class")
    parser.add_argument(
        "--target", default="auto",
        help="table or llama (tiny, enumerated), or a checkpoint (smollm2-135m), tested without enumeration",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, help="by default a panel of settings, mixed in every batch")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument(
        "--samples", type=int, help=f"sequences (default {lab.SAMPLES:,}; a checkpoint: {large.SEQUENCES})"
    )
    parser.add_argument("--alpha", type=float, default=lab.ALPHA, help="level of the whole family of tests")
    parser.add_argument(
        "--detect", type=float, metavar="TV",
        help="total variation to be caught with 99 %% probability; with less power the verdict is INCONCLUSIVE "
        f"(default {lab.DETECT:g}; a checkpoint: {large.DETECT:g}, of the transform's law)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", metavar="FILE.json", help="write the report, and a picture beside it")


def run(args: argparse.Namespace) -> int:
    """Run the tests and print the verdict.

    Returns:
      0 for PASS (and for the measured divergence of an approximate rule), 1 for FAIL, 2 for INCONCLUSIVE
      and for bad input.
    """
    try:
        report = _report(args)
    except ValueError as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2
    print(report)
    if args.output:
        print("  written     " + ", ".join(str(path) for path in report.save(args.output)))
    return EXIT_CODES.get(report.verdict, 0)


def _report(args: argparse.Namespace) -> lab.Report:
    chosen = plugins.load_drafter(args.drafter, dict(_pair(text) for text in args.set)) if args.drafter else None
    rule = load_rule(args.rule)
    filters = (args.top_k, args.top_p, args.min_p)
    settings: tuple[Setting, ...] = lab.SETTINGS
    if args.temperature is not None or filters != (0, 1.0, 0.0):
        settings = (Setting(1.0 if args.temperature is None else args.temperature, *filters),)
        settings[0].sampler()  # checks ranges
    if args.target not in ("auto", "table", "llama"):
        if chosen is None:
            raise ValueError(f"target {args.target}: name a drafter to test with it, e.g. --drafter fp8")
        setting = settings[0] if len(settings) == 1 else large.SETTING
        return large.check_large(
            chosen, args.target, rule=rule, setting=setting, sequences=_or(args.samples, large.SEQUENCES),
            alpha=args.alpha, detect=_or(args.detect, large.DETECT), seed=args.seed, progress=_progress,
        )  # fmt: skip
    return lab.check(
        chosen, rule=rule, target=args.target, settings=settings, samples=_or(args.samples, lab.SAMPLES),
        alpha=args.alpha, detect=_or(args.detect, lab.DETECT), seed=args.seed, progress=_progress,
    )  # fmt: skip


def load_rule(spec: str) -> verify.Rule:
    """A rule by name, or a class of a file by `./file.py:Class`.

    Raises:
      ValueError: an unknown name or a file without that class.
    """
    if spec in verify.RULES:
        return verify.RULES[spec]()
    path, _, name = spec.partition(":")
    if not name or not Path(path).is_file():
        raise ValueError(f"rule {spec!r}: must be one of {', '.join(verify.RULES)}, or ./file.py:Class")
    found = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"rule {spec!r}: {path} has no class {name!r}")
    return getattr(module, name)()


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"--set {text!r}: write FIELD=VALUE")
    return name, value


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
