"""Running strategies side by side: decode batches, and take time and memory so that they can be compared.

Nothing is timed before it was compiled and run once; the device is synchronised around every timing;
strategies take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import decode, verify
from specjax import offload as offloading
from specjax.drafter import Drafter
from specjax.engine import Engine, Generation, LanguageModel, NotFiniteError
from specjax.types import Cache, Draft, Model, Params

T = TypeVar("T")


def make_engine(target: LanguageModel, drafter: Drafter, rule: verify.Rule, offload: str = "") -> Engine:
    """An engine; `offload` moves the drafter's weights to host memory between drafts."""
    engine = Engine(target, drafter, rule=rule)
    if not offload:
        return engine
    drafter, own = offloading.move(drafter, engine.drafter_params)
    return Engine(target, drafter, rule=rule, drafter_params=own)


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together, as many rows as every other batch of a run."""

    prompts: Sequence[Sequence[int]]
    rows: Sequence[int]  # each prompt's own number: its randomness comes from it
    capacity: int
    size: int  # rows of the compiled program; missing ones repeat the last prompt and are not counted

    def padded(self, values: Sequence[T]) -> list[T]:
        """`values` a prompt, filled up to the batch's size."""
        return [*values, *[values[-1]] * (self.size - len(values))]


@dataclass(frozen=True)
class Options:
    """What all batches of a run have in common."""

    max_new_tokens: int
    seed: int
    end_ids: tuple[int, ...]
    sampling: Mapping[str, Any]  # temperature, top_k, top_p, min_p


@dataclass(frozen=True)
class Decoded:
    """A batch's results. `error` is what stopped a row; the others are complete."""

    generations: list[Generation]
    prefill_s: float
    decode_s: float
    error: NotFiniteError | None = None


def decode_batch(engine: Engine, batch: Batch, options: Options) -> Decoded:
    """Prefill and decode one batch, timed apart."""
    begin = time.perf_counter()
    state = jax.block_until_ready(start(engine, batch, options))
    prefilled = time.perf_counter()
    state = wait(decode.run(engine.program, engine.params, engine.drafter_params, state))
    end = time.perf_counter()
    error: NotFiniteError | None = None
    generations: list[Generation]
    try:
        generations = engine.results(state, batch.padded(batch.prompts))
    except NotFiniteError as stopped:
        generations, error = stopped.generations, stopped
    return Decoded(generations[: len(batch.prompts)], prefilled - begin, end - prefilled, error)


def wait(tree: T) -> T:
    """`jax.block_until_ready`, but Ctrl-C is heard; it looks again after a hundredth of the time that has passed."""
    begin, leaves = time.perf_counter(), [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "is_ready")]
    while not all(leaf.is_ready() for leaf in leaves):  # keys have no such method; one program writes them all
        time.sleep(min(0.05, 1e-4 + 0.01 * (time.perf_counter() - begin)))
    return tree


def start(engine: Engine, batch: Batch, options: Options, max_new_tokens: int | None = None) -> decode.State:
    """The batch after its prefill."""
    return engine.start(
        batch.padded(batch.prompts),
        **options.sampling,
        max_new_tokens=options.max_new_tokens if max_new_tokens is None else max_new_tokens,
        seed=options.seed,
        rows=batch.padded(batch.rows),
        end_ids=options.end_ids,
        capacity=batch.capacity,
    )


def compile_batch(engine: Engine, batch: Batch, options: Options) -> tuple[float, Any]:
    """Compile all that `decode_batch` runs, and run it on an empty budget.

    Returns:
      seconds that it took, and the compiled loop (for `specjax.memory`).
    """
    begin = time.perf_counter()
    state = start(engine, batch, options, max_new_tokens=0)
    compiled = decode.run.lower(engine.program, engine.params, engine.drafter_params, state).compile()
    jax.block_until_ready(decode.run(engine.program, engine.params, engine.drafter_params, state))
    return time.perf_counter() - begin, compiled


@dataclass(frozen=True)
class Halves:
    """A strategy's rounds, taken apart."""

    draft_s: float
    verify_s: float
    fault: str  # what of its drafts would change the target's probabilities, whatever the rule; empty: nothing


def take_halves(engines: dict[str, Engine], batch: Batch, options: Options, rounds: int = 6) -> dict[str, Halves]:
    """Median seconds of drafting and of verifying, over the first rounds of a real batch, whose drafts are checked.

    Rounds of all strategies alternate; each one's first round compiles and is left out of the times.
    """
    states = {name: start(engine, batch, options) for name, engine in engines.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    faults = dict.fromkeys(engines, "")
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            length = jnp.copy(states[name].length)  # the state is donated
            before = committed_bits(states[name].cache, length)
            begin = time.perf_counter()
            half = jax.block_until_ready(_draft(engine.program, engine.params, engine.drafter_params, states[name]))
            middle = time.perf_counter()
            after, fault = committed_bits(half[0].cache, length), draft_fault(half[1])
            if (before != after).any():
                fault = "its `propose` overwrites keys or values of committed tokens in the target's cache"
            faults[name] = faults[name] or fault
            verifying = time.perf_counter()
            states[name] = jax.block_until_ready(_verify(engine.program, engine.params, engine.drafter_params, *half))
            times[name].append((middle - begin, time.perf_counter() - verifying))
    medians = {
        name: [statistics.median(half) for half in zip(*taken[1:], strict=True)] for name, taken in times.items()
    }
    return {name: Halves(draft_s, verify_s, faults[name]) for name, (draft_s, verify_s) in medians.items()}


def draft_fault(draft: Draft) -> str:
    """Why no rule can be exact for this draft: its `log_q` is no distribution, or excludes what was drafted."""
    if draft.log_q is None or not draft.tokens.shape[1]:
        return ""
    sums, own = map(np.asarray, _masses(draft.log_q, draft.tokens))
    vocab, steps = draft.log_q.shape[-1], np.arange(draft.tokens.shape[1])[None]
    real = (np.asarray(draft.tokens) >= 0) & (np.asarray(draft.tokens) < vocab)
    if draft.count is not None:
        real &= steps < np.asarray(draft.count)[:, None]
    for row, node in np.argwhere(real & ~(np.abs(sums - 1) < 1e-3)):
        return f"the probabilities that it reports for draft {node} sum to {sums[row, node]:.4g}"
    for _, node in np.argwhere(real & ~(own > 0)):
        return f"draft {node} is a token to which it reports probability 0"
    return ""


@jax.jit
def _masses(log_q: Float[Array, "B N V"], tokens: Int[Array, "B N"]) -> tuple[Array, Array]:
    q = jnp.exp(log_q)
    return q.sum(-1), jnp.take_along_axis(q, tokens[..., None], 2, mode="clip")[..., 0]


@jax.jit
def committed_bits(cache: Cache, length: Int[Array, "B"]) -> Int[Array, "P"]:
    """A hash of each part of the cache, of committed slots alone."""
    slots = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
    committed = (slots < length[:, None] - 1)[:, None, :, None]
    sums = []
    for part in jax.tree.leaves(cache):
        bits = jax.lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}").astype(jnp.uint32)
        place = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)  # odd factors: what changes places counts
        sums.append(jnp.sum(jnp.where(committed, bits * (2 * place + 1), 0), dtype=jnp.uint32))
    return jnp.stack(sums)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def _draft(
    program: decode.Program, params: Params, drafter_params: Params, state: decode.State
) -> tuple[decode.State, Draft]:
    """`decode.propose`, donated: caches stay in the state, so that the draft beside it holds none of them."""
    draft = decode.propose(program, params, drafter_params, state)
    state = dataclasses.replace(state, cache=draft.cache, drafter=draft.state)
    return state, dataclasses.replace(draft, cache=Cache(()), state=())


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def _verify(
    program: decode.Program, params: Params, drafter_params: Params, state: decode.State, draft: Draft
) -> decode.State:
    """`decode.verify_and_commit`, donated."""
    draft = dataclasses.replace(draft, cache=state.cache, state=state.drafter)
    return decode.verify_and_commit(program, params, drafter_params, state, draft)


def margin(model: Model, params: Params, tokens: Sequence[int], cache_dtype: Any) -> float:
    """How far the target's largest logit after `tokens` lies above the second: what rounding would have to bridge."""
    ids = jnp.asarray(np.asarray(tokens, np.int32)[None])

    @jax.jit
    def logits(params: Params) -> Any:
        cache = model.init_cache(1, len(tokens), cache_dtype)
        hidden = model.forward(params, ids, cache, jnp.zeros((1,), jnp.int32)).hidden
        return model.logits(params, hidden[:, -1:])[0, 0]

    first, second = jax.lax.top_k(logits(params), 2)[0]
    return float(first - second)
