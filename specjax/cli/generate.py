"""`specjax generate "prompt"`: text as it is decoded, round by round, and then what the drafter was worth.

The text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from specjax import plugins
from specjax.cli import interrupts, options, table
from specjax.cli.errors import Failure, refusing
from specjax.evaluate.answer import Answer
from specjax.language_model import load_target

DRAFTER = "ngram"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("prompt", help="what to ask; `-` reads it from stdin")
    options.add_model_arguments(parser)
    parser.add_argument(
        "--drafter", default=DRAFTER, metavar="NAME",
        help="a name or ./file.py:Class, with settings as NAME:FIELD=VALUE,... (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=options.positive, default=256, help="default: %(default)s")
    parser.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")


def run(args: argparse.Namespace) -> int:
    """Stream the answer; returns the exit code."""
    with refusing():
        answer = _prepare(args)
    print("compiling ...", end="", file=sys.stderr, flush=True)
    print(f" {answer.compile():.1f} s", file=sys.stderr, flush=True)
    with _deferred_interrupt() as interrupted:
        for pieces in answer.rounds(stop=interrupted.is_set):
            _print_pieces(pieces)
    print(flush=True)
    row, title = answer.row(args.drafter)
    table.print_table([row], title, table.make_console(stderr=True))
    _, error = answer.result()
    if error is not None:
        raise Failure(str(error)) from error
    return 130 if interrupted.is_set() else 0


def _prepare(args: argparse.Namespace) -> Answer:
    [drafter] = options.load_drafters([args.drafter], args.settings).values()
    return Answer.prepare(
        load_target(args.target, dtype=args.dtype),
        drafter,
        sys.stdin.read() if args.prompt == "-" else args.prompt,
        rule=plugins.load_rule(args.rule),
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        sampling={name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")},
        system=args.system,
        raw=args.raw,
    )


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C end the text after its round, where the state is whole; a second one ends at once."""
    asked = threading.Event()

    def handler(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        interrupts.note()
        asked.set()

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield asked
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def _print_pieces(pieces: Sequence[str]) -> None:
    sys.stdout.write("".join(pieces))
    sys.stdout.flush()
