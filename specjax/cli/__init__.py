"""The command line: `specjax compare`, `specjax generate`, ... Each subcommand is a module of its own.

A module is named in `COMMANDS` and has `add_arguments(parser)` and `run(args) -> exit code`; it is
imported when its command is used. Exit codes: 0 done, 1 failed, 2 refused before any work, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from specjax.cli import interrupts
from specjax.cli.errors import Failure, Refusal

COMMANDS = {
    "compare": ("specjax.cli.compare", "decode the same prompts with every drafter and print one table"),
    "generate": ("specjax.cli.generate", "stream the answer to one prompt, then its statistics"),
    "memory": ("specjax.cli.memory", "what every strategy holds in memory, for models and devices that are not here"),
    "plan": ("specjax.cli.plan", "predict which strategy and window to choose for a device, and what gives way"),
    "load": ("specjax.cli.load", "early warnings and fingerprints of load, from a run's own records"),
    "exactness": ("specjax.cli.exactness", "test whether a drafter and a rule keep the target's distribution"),
    "drafters": ("specjax.cli.drafters", "list the drafters and their settings"),
}


class _Parser(argparse.ArgumentParser):
    """Errors are one line, printed in one place."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise Refusal(f"{message} (see `{self.prog} --help`)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without arguments it is the process's own command, and may end it."""
    _prepare_streams()
    with interrupts.watching():
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
    if code == interrupts.EXIT_CODE and arguments is None:
        interrupts.leave(code)
    return code


def _prepare_streams() -> None:
    """A console that lacks a character shows `?` for it, and a stream that was closed is an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run(arguments: list[str]) -> int:
    try:
        args = _parse(arguments)
        code = int(importlib.import_module(COMMANDS[args.command][0]).run(args))
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        print(f"specjax: error: {refusal}", file=sys.stderr)
        return 2
    except Failure as failure:
        print(f"specjax: failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        interrupts.note()
        print("specjax: interrupted", file=sys.stderr)
        return interrupts.EXIT_CODE
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader of our output has left, and knows
            print(f"specjax: failed: the output can't be written ({error.strerror or error})", file=sys.stderr)
        with contextlib.suppress(OSError, ValueError):  # what stands in its buffer would fail again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="specjax", description="Research on speculative decoding in JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in arguments:
            importlib.import_module(module).add_arguments(command)
    return parser.parse_args(arguments)
