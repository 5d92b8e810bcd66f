"""`specjax exactness`: the verdict on a drafter and a rule, printed, with JSON and a picture on request."""

from __future__ import annotations

import argparse
from pathlib import Path

from specjax import plugins, verify
from specjax.cli import options
from specjax.cli.errors import Refusal, refusing
from specjax.cli.progress import Progress
from specjax.exactness import lab, large
from specjax.exactness.experiment import Setting
from specjax.exactness.report import FAIL, INCONCLUSIVE, PASS, Report

EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 2}  # an approximate rule is not an error: 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument(
        "--drafter",
        help="a name, ./file.py:Class or a folder, with settings as :FIELD=VALUE; by default the chosen instances' own",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the drafter, e.g. exit_layer=1"
    )
    parser.add_argument(
        "--rule", default="token", help=f"{', '.join(verify.RULES)}, with settings as :FIELD=VALUE, or ./file.py:Class"
    )
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
    parser.add_argument("--seed", type=options.seed, default=0)
    parser.add_argument("--output", metavar="FILE.json", help="write the report, and a picture beside it")


def run(args: argparse.Namespace) -> int:
    """Run the tests and print the verdict.

    Returns:
      0 for PASS (and for the measured divergence of an approximate rule), 1 for FAIL, 2 for INCONCLUSIVE
      and for bad input.
    """
    if args.set and not args.drafter:
        raise Refusal(f"--set {args.set[0]}: name the drafter whose field it is, with --drafter")
    with refusing():
        if args.output:
            _check_writable(Path(args.output))
    try:
        report = _report(args)
    except Refusal:
        raise
    except ValueError as error:
        raise Refusal(str(error)) from error
    except Exception as error:  # of a drafter's or a rule's own code
        what = f"{args.drafter or 'the drafter'} with rule {args.rule}"
        raise Refusal(f"{what} can't be tested: {type(error).__name__}: {' '.join(str(error).split())}") from error
    print(report)
    if args.output:
        print("  written     " + ", ".join(str(path) for path in report.save(args.output)))
    return EXIT_CODES.get(report.verdict, 0)


def _check_writable(path: Path) -> None:
    """Found out before the test, not after it."""
    there = path.exists()
    with path.open("a"):
        pass
    if not there:
        path.unlink()


def _report(args: argparse.Namespace) -> Report:
    with refusing():
        named = [args.drafter] if args.drafter else []
        drafter = next(iter(options.load_drafters(named, args.set).values()), None)
        rule = plugins.load_rule(args.rule)
    filters = (args.top_k, args.top_p, args.min_p)
    settings: tuple[Setting, ...] = lab.SETTINGS
    if args.temperature is not None or filters != (0, 1.0, 0.0):
        settings = (Setting(1.0 if args.temperature is None else args.temperature, *filters),)
        settings[0].sampler()  # checks ranges
    enumerated = args.target in ("auto", "table", "llama")
    samples = (lab.SAMPLES if enumerated else large.SEQUENCES) if args.samples is None else args.samples
    detect = (lab.DETECT if enumerated else large.DETECT) if args.detect is None else args.detect
    if drafter is None and not enumerated:
        raise ValueError(f"target {args.target}: name a drafter to test with it, e.g. --drafter fp8")
    own = 1 if drafter else 2
    with Progress(lab.sequences(samples, own) if enumerated else large.sequences(samples)) as bar:
        heard = ""

        def progress(what: str, count: int) -> None:
            nonlocal heard
            bar.advance(count)
            if what != heard:
                bar.describe(heard := what)

        if enumerated:
            seconds = lab.predicted_seconds(samples, own)
            bar.describe(f"predicted {seconds:.0f} s: {lab.PREDICTION}")
            return lab.check(
                drafter, rule=rule, target=args.target, settings=settings, samples=samples, alpha=args.alpha,
                detect=detect, seed=args.seed, progress=progress,
            )  # fmt: skip
        return large.check_large(
            drafter or "", args.target, rule=rule, setting=settings[0] if len(settings) == 1 else large.SETTING,
            sequences=samples, alpha=args.alpha, detect=detect, seed=args.seed, progress=progress,
        )  # fmt: skip
