"""Drafters that draw from one law and report another, a cache that keeps rejected tokens, and faulty loops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import decode, sampling
from specjax.exactness.subjects import TableDrafter
from specjax.testing import TableModel
from specjax.types import Cache, Forward, Keys, Params, Sampling, Target


@dataclass(frozen=True)
class Liar(TableDrafter):
    """Base: `drawn` and `reported` are made from the law after the target's filters, or from raw logits."""

    def drawn(self, log_q: Float[Array, "B V"], raw: Float[Array, "B V"], sampler: Sampling) -> Float[Array, "B V"]:
        """What the token is drawn from."""
        return log_q

    def reported(self, log_q: Float[Array, "B V"], raw: Float[Array, "B V"], sampler: Sampling) -> Float[Array, "B V"]:
        """What is handed over."""
        return log_q

    def draw(
        self, keys: Keys, params: Params, target: Target, context: Int[Array, "B O"]
    ) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
        """A token from one law, and the other."""
        log_q = self.laws(params, target, context)
        raw = jax.nn.log_softmax(params["table"][tuple(context[:, i] for i in range(self.order))])
        sampler = target.sampling
        return sampling.draw(keys, self.drawn(log_q, raw, sampler)), self.reported(log_q, raw, sampler)


def _tempered(log_q: Float[Array, "B V"], temperature: float) -> Float[Array, "B V"]:
    return jax.nn.log_softmax(log_q / temperature)


@dataclass(frozen=True)
class HotterDraw(Liar):
    """drawn at 0.8 of the temperature that is reported"""

    def drawn(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        return _tempered(log_q, 0.8)


@dataclass(frozen=True)
class ArgmaxDraw(Liar):
    """the argmax, with the softmax reported"""

    def drawn(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        return jnp.where(log_q == log_q.max(-1, keepdims=True), log_q, -jnp.inf)


@dataclass(frozen=True)
class TopTwoDraw(Liar):
    """drawn from the two largest, the whole law reported"""

    def drawn(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        return jnp.where(log_q >= jnp.sort(log_q, -1)[:, -2:-1], log_q, -jnp.inf)


@dataclass(frozen=True)
class UnfilteredReport(Liar):
    """drawn after the filters, the raw law reported"""

    def reported(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        return raw


@dataclass(frozen=True)
class UnfilteredDraw(Liar):
    """drawn from the raw law, the filtered one reported"""

    def drawn(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        return raw


@dataclass(frozen=True)
class FilterBeforeTemperature(Liar):
    """drawn with the filters before the temperature, reported with the temperature before the filters"""

    def drawn(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        filtered = sampling.log_probs(raw[:, None], replace(sampler, temperature=jnp.ones_like(sampler.temperature)))
        plain = replace(sampler, top_k=0 * sampler.top_k, top_p=jnp.ones_like(sampler.top_p), min_p=0 * sampler.min_p)
        return sampling.log_probs(filtered, plain)[:, 0]


@dataclass(frozen=True)
class Bfloat16Draw(Liar):
    """drawn from the law in bfloat16, reported in float32"""

    def drawn(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        return log_q.astype(jnp.bfloat16).astype(jnp.float32)


@dataclass(frozen=True)
class Bfloat16Report(Liar):
    """drawn in float32, reported in bfloat16"""

    def reported(self, log_q: Array, raw: Array, sampler: Sampling) -> Array:
        return log_q.astype(jnp.bfloat16).astype(jnp.float32)


@dataclass(frozen=True)
class StaleTable(TableModel):
    """A table target whose cache keeps what was first written to a slot: rejected drafts stay."""

    def forward(
        self, params: Params, inputs: Array, cache: Cache | None, start: Int[Array, "B"], **options: Any
    ) -> Forward:
        """As the table target, on slots that can be written once; the cache's second half marks them."""
        out = super().forward(params, inputs, cache, start, **options)
        assert cache is not None
        assert out.cache is not None
        [(ids, written)] = cache.layers
        slot = jnp.arange(ids.shape[2], dtype=jnp.int32)[None, None, :, None]
        first = start[:, None, None, None]
        now = (slot >= first) & (slot < first + inputs.shape[1])
        now = now & (inputs.shape[1] < ids.shape[2])  # prefill writes the whole buffer, mostly padding
        kept = jnp.where(written > 0, ids, out.cache.layers[0][0])
        marked = Cache(((kept, jnp.where(now, 1.0, written)),))
        return Forward(self._contexts(kept, start, inputs.shape[1]), (), marked)

    def _contexts(self, ids: Array, start: Array, queries: int) -> Array:
        last = start[:, None] + jnp.arange(queries, dtype=jnp.int32)[None]
        index = last[..., None] + jnp.arange(1 - self.order, 1, dtype=jnp.int32)[None, None]
        index = jnp.minimum(index, ids.shape[2] - 1)
        flat = jnp.take_along_axis(ids[:, 0, :, 0], jnp.maximum(index, 0).reshape(ids.shape[0], -1), 1)
        return jnp.where(index >= 0, flat.reshape(index.shape), self.size).astype(jnp.float32)


FAULTY_DRAFTERS: dict[str, type[Liar]] = {
    kind.__name__: kind
    for kind in (
        HotterDraw, ArgmaxDraw, TopTwoDraw, UnfilteredReport, UnfilteredDraw, FilterBeforeTemperature,
        Bfloat16Draw, Bfloat16Report,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Liars(TableDrafter):
    """Every liar on an equal block of rows, in order: one compilation for all."""

    def draw(
        self, keys: Keys, params: Params, target: Target, context: Int[Array, "B O"]
    ) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
        """Each block's own liar draws and reports."""
        kinds = [kind(self.num_speculative_tokens, self.order, self.seed) for kind in FAULTY_DRAFTERS.values()]
        tokens, laws = zip(*(kind.draw(keys, params, target, context) for kind in kinds), strict=True)
        rows = jnp.arange(context.shape[0], dtype=jnp.int32)
        own = rows * len(kinds) // context.shape[0]
        return jnp.stack(tokens)[own, rows], jnp.stack(laws)[own, rows]


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
