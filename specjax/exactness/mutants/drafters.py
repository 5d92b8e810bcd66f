"""Drafters that draw from one law and report another, a cache that keeps rejected tokens, and faulty loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import decode, sampling
from specjax.exactness.subjects import TableDrafter
from specjax.testing import TableModel
from specjax.types import Cache, Forward, Keys, Params, Sampling, Target

LawOf = Callable[[Array, Array, Sampling], Array]  # of the law after the target's filters, the raw one, and those


@dataclass(frozen=True)
class Liar:
    """What a token is drawn from, and what is handed over."""

    name: str
    fault: str
    drawn: LawOf = lambda log_q, raw, sampler: log_q
    reported: LawOf = lambda log_q, raw, sampler: log_q


def _filter_first(log_q: Array, raw: Array, sampler: Sampling) -> Array:
    filtered = sampling.log_probs(raw[:, None], replace(sampler, temperature=jnp.ones_like(sampler.temperature)))
    plain = replace(sampler, top_k=0 * sampler.top_k, top_p=jnp.ones_like(sampler.top_p), min_p=0 * sampler.min_p)
    return sampling.log_probs(filtered, plain)[:, 0]


def _rounded(log_q: Array, raw: Array, sampler: Sampling) -> Array:
    return log_q.astype(jnp.bfloat16).astype(jnp.float32)


def _best(log_q: Array, raw: Array, sampler: Sampling) -> Array:
    return jnp.where(log_q == log_q.max(-1, keepdims=True), log_q, -jnp.inf)


def _best_two(log_q: Array, raw: Array, sampler: Sampling) -> Array:
    return jnp.where(log_q >= jnp.sort(log_q, -1)[:, -2:-1], log_q, -jnp.inf)


LIARS = (
    Liar(
        "HotterDraw", "drawn at 0.8 of the temperature that is reported",
        lambda log_q, raw, sampler: jax.nn.log_softmax(log_q / 0.8),
    ),
    Liar("ArgmaxDraw", "the argmax, with the softmax reported", _best),
    Liar("TopTwoDraw", "drawn from the two largest, the whole law reported", _best_two),
    Liar(
        "UnfilteredReport", "drawn after the filters, the raw law reported",
        reported=lambda log_q, raw, sampler: raw,
    ),
    Liar("UnfilteredDraw", "drawn from the raw law, the filtered one reported", lambda log_q, raw, sampler: raw),
    Liar(
        "FilterBeforeTemperature",
        "drawn with the filters before the temperature, reported with the temperature before the filters",
        _filter_first,
    ),
    Liar("Bfloat16Draw", "drawn from the law in bfloat16, reported in float32", _rounded),
    Liar("Bfloat16Report", "drawn in float32, reported in bfloat16", reported=_rounded),
)  # fmt: skip


@dataclass(frozen=True)
class Liars(TableDrafter):
    """Every liar on an equal block of rows, in order: one compilation for all."""

    def draw(
        self, keys: Keys, params: Params, target: Target, context: Int[Array, "B O"]
    ) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
        """Each block's own liar draws and reports."""
        log_q = self.laws(params, target, context)
        raw = jax.nn.log_softmax(params["table"][tuple(context[:, i] for i in range(self.order))])
        rows = jnp.arange(context.shape[0], dtype=jnp.int32)
        own = rows * len(LIARS) // context.shape[0]
        drawn = jnp.stack([liar.drawn(log_q, raw, target.sampling) for liar in LIARS])[own, rows]
        return sampling.draw(keys, drawn), jnp.stack(
            [liar.reported(log_q, raw, target.sampling) for liar in LIARS]
        )[own, rows]  # fmt: skip


@dataclass(frozen=True)
class StaleTable(TableModel):
    """A table target whose cache keeps what was first written to a slot: rejected drafts stay."""

    def forward(
        self, params: Params, inputs: Array, cache: Cache | None, start: Int[Array, "B"], **options: Any
    ) -> Forward:
        """As the table target, on slots that can be written once; the cache's second half marks them."""
        assert cache is not None
        [(ids, written)] = cache.layers
        slots = start[:, None] + jnp.arange(inputs.shape[1], dtype=jnp.int32)[None]
        old, known = (jnp.take_along_axis(part[:, 0, :, 0], slots, 1) for part in (ids, written))
        kept = jnp.where(known > 0, old, inputs.astype(old.dtype)).astype(jnp.int32)
        out = super().forward(params, kept, cache, start, **options)
        if inputs.shape[1] < ids.shape[2]:  # prefill writes the whole buffer, mostly padding
            written = written.at[jnp.arange(len(slots))[:, None], 0, slots, 0].set(1.0)
        assert out.cache is not None
        return replace(out, cache=Cache(((out.cache.layers[0][0], written),)))


def late_end(program: decode.Program, params: Any, drafter_params: Any, state: decode.State) -> decode.State:
    """End-of-sequence is looked for in a round's last token only."""
    ends = state.end_ids

    def body(state: decode.State) -> decode.State:
        blind = replace(state, end_ids=jnp.full_like(ends, -1))
        state = replace(decode.decode_round(program, params, drafter_params, blind), end_ids=ends)
        last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, 1)
        return replace(state, done=state.done | jnp.any(last == ends[None], -1))

    return jax.lax.while_loop(lambda state: ~jnp.all(state.done), body, state)


def bonus_counted(program: decode.Program, params: Any, drafter_params: Any, state: decode.State) -> decode.State:
    """The bonus token is counted as an accepted draft."""
    state = decode.run(program, params, drafter_params, state)
    return replace(state, counts=replace(state.counts, accepted=state.counts.emitted))
