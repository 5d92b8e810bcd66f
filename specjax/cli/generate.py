"""`specjax generate "prompt"`: text as it is decoded, round by round, and then what the drafter was worth.

The text goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from specjax import decode, memory, verify
from specjax.cli import options, table
from specjax.cli.errors import Failure, refusing
from specjax.engine import Engine, Generation, NotFiniteError, capacity_for
from specjax.evaluate import measure
from specjax.evaluate.preparation import SMALLEST_CAPACITY
from specjax.evaluate.record import Record
from specjax.evaluate.rows import Measured, make_rows

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


@dataclass(frozen=True)
class Request:
    """One prompt, ready to be decoded."""

    subject: options.Subject
    engine: Engine
    batch: measure.Batch
    shared: measure.Options


def run(args: argparse.Namespace) -> int:
    """Stream the answer; returns the exit code."""
    with refusing():
        request = _prepare(args)
    print("compiling ...", end="", file=sys.stderr, flush=True)
    compile_s = _compile(request)
    print(f" {compile_s:.1f} s", file=sys.stderr, flush=True)

    begin = time.perf_counter()
    state = jax.block_until_ready(measure.start(request.engine, request.batch, request.shared))
    prefilled = time.perf_counter()
    with _deferred_interrupt() as interrupted:
        state = _stream(request, state, interrupted)
    decode_s = time.perf_counter() - prefilled
    print(flush=True)
    error = None
    try:
        [generation] = request.engine.results(state, request.batch.prompts)
    except NotFiniteError as stopped:
        [generation], error = stopped.generations, stopped
    _print_statistics(request, args.drafter, generation, (prefilled - begin, decode_s, compile_s))
    if error is not None:
        raise Failure(str(error)) from error
    return 130 if interrupted.is_set() else 0


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Let the first Ctrl-C end the text after its round, where the state is whole; a second one ends at once."""
    asked = threading.Event()

    def handler(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield asked
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def _prepare(args: argparse.Namespace) -> Request:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty: give it some text")
    sampler = options.make_sampling(args, 1)
    subject = options.open_subject(args)
    [drafter] = options.load_drafters([args.drafter], args.settings, subject).values()
    tokens = subject.encode(text, args.system, raw=args.raw)
    context = subject.model.context_length
    if len(tokens) + args.max_new_tokens > context:
        raise ValueError(
            f"the prompt of {len(tokens)} tokens and max_new_tokens={args.max_new_tokens} exceed the target's context "
            f"of {context}: shorten the prompt or lower --max-new-tokens"
        )
    needed = max(len(tokens) + args.max_new_tokens, drafter.num_speculative_tokens + 1)
    capacity = min(max(SMALLEST_CAPACITY, capacity_for(needed)), context)
    engine = Engine(subject.model, subject.load(), drafter, rule=verify.RULES[args.rule]())
    shared = measure.Options(args.max_new_tokens, args.seed, subject.tokenizer.end_ids, sampler)
    return Request(subject, engine, measure.Batch([tokens], [0], capacity, 1), shared)


def _compile(request: Request) -> float:
    begin, engine = time.perf_counter(), request.engine
    state = measure.start(engine, request.batch, request.shared, max_new_tokens=0)
    jax.block_until_ready(decode.step(engine.program, engine.params, engine.drafter_params, state))
    return time.perf_counter() - begin


def _stream(request: Request, state: decode.State, interrupted: threading.Event) -> decode.State:
    """Rounds until the row is done; prints what each one committed."""
    engine, seen = request.engine, len(request.batch.prompts[0])
    stream = request.subject.tokenizer.stream()
    while True:
        tokens, length, done = jax.device_get((state.tokens[0], state.length[0], state.done[0]))
        _print_pieces([stream.push(token) for token in tokens[seen:length].tolist()])
        seen = int(length)
        if done or interrupted.is_set():
            _print_pieces([stream.flush()])
            return state
        state = decode.step(engine.program, engine.params, engine.drafter_params, state)


def _print_pieces(pieces: Sequence[str]) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write("".join(pieces).encode(encoding, "replace").decode(encoding))  # a terminal may lack a character
    sys.stdout.flush()


def _print_statistics(request: Request, name: str, generation: Generation, seconds: tuple[float, float, float]) -> None:
    engine, batch, (prefill_s, decode_s, compile_s) = request.engine, request.batch, seconds
    account = memory.account(
        engine.program, engine.params, engine.drafter_params,
        batch=1, capacity=batch.capacity, cache_dtype=engine.cache_dtype,
    )  # fmt: skip
    known = Measured(
        settings=repr(engine.program.drafter),
        label=engine.program.drafter.label,
        exact=engine.program.exact,
        compile_s=compile_s,
        added_bytes=account.added_bytes,
        peak_bytes=account.peak_bytes,
    )
    record = Record(
        question_id="prompt", category="prompt", drafter=name, prompt_tokens=len(batch.prompts[0]),
        capacity=batch.capacity, batch_rows=1, session="", finish="", prefill_s=prefill_s, decode_s=decode_s,
        tokens=generation.tokens, text="", counts=generation.counts,
    )  # fmt: skip
    title = (
        f"{request.subject.checkpoint.name}, {request.subject.dtype}: {len(batch.prompts[0])} prompt tokens in "
        f"{prefill_s:.2f} s, {len(generation.tokens)} new ones, finish: {generation.finish}"
    )
    [row] = make_rows({name: known}, [record], greedy=False)
    del row["greedy_equal"]  # nothing to compare with
    table.print_table([row], title, table.make_console(stderr=True))
