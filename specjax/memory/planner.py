"""Which strategy, with which window, under a budget of memory and a bound on latency: predictions, ranked.

With a batch given, strategies are ranked there; without, each gets the largest batch that the budget and
the latency allow (its effective batch), and the tokens a second that it reaches with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specjax import mesh
from specjax.memory import roofline
from specjax.memory.acceptance import Acceptance, Profile
from specjax.memory.growth import Growth, grow, largest
from specjax.memory.hardware import Device, GiB
from specjax.memory.roofline import Prediction
from specjax.memory.strategy import FP8, build

PLAIN = "none"


@dataclass(frozen=True)
class Question:
    """What is asked for. `batch` 0: as many rows as the bounds allow."""

    target: str
    drafters: tuple[str, ...]
    device: Device
    layout: mesh.Layout
    acceptance: Acceptance
    context: int
    batch: int
    windows: tuple[int, ...]
    limit_bytes: int
    latency_s: float | None = None
    dtype: str = "bfloat16"
    cache_dtype: str = ""

    @functools.cached_property
    def growths(self) -> dict[str, Growth]:
        """Every strategy at any size, `none` first."""
        return {spec: self.growth(spec) for spec in dict.fromkeys((PLAIN, *self.drafters))}

    def growth(self, spec: str) -> Growth:
        """One strategy at any size."""
        windows = () if spec == PLAIN else self.windows_of(spec)
        return grow(self.target, spec, self.dtype, self.cache_dtype, self.layout, self.device.platform, windows)

    def predict(self, spec: str, batch: int, context: int, window: int) -> Prediction:
        """Times and tokens; a drafter of unknown acceptance is taken to emit one token a round."""
        growths, profile = self.growths, self.profile(spec)
        return roofline.predict(growths[spec], growths[PLAIN], profile, self.device, batch, context, window)

    def profile(self, spec: str) -> Profile | None:
        """Its acceptance; `None` is unknown."""
        return Profile((), "drafts nothing") if spec == PLAIN else self.acceptance.of(spec)

    def allows(self, spec: str, batch: int, context: int, window: int) -> bool:
        """Whether memory and latency suffice."""
        if self.growths[spec].needed_bytes(batch, context, window) > self.limit_bytes:
            return False
        return self.latency_s is None or self.predict(spec, batch, context, window).latency_s <= self.latency_s

    def windows_of(self, spec: str) -> tuple[int, ...]:
        """Windows to try: those asked for, of a drafter that can have them, else its own."""
        if spec == PLAIN:
            return (0,)
        found, refused = set(), ValueError(f"drafter {spec} has no window")
        for window in self.windows:
            try:
                found.add(build(spec, window).num_speculative_tokens)
            except ValueError as error:
                refused = error
        if not found:
            raise refused
        return tuple(sorted(found))


@dataclass(frozen=True)
class Option:
    """A strategy with a window. `refusal` says why it is out; then the prediction is at the smallest batch."""

    spec: str
    prediction: Prediction
    needed_bytes: int
    largest_batch: int  # that memory allows, whatever the latency
    refusal: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """The better, the larger."""
        return not self.refusal, self.prediction.tokens_per_s


def options(question: Question) -> list[Option]:
    """All strategies with all windows, the best first; those that are out stand at the end."""
    found = [_option(question, spec, window) for spec in question.growths for window in question.windows_of(spec)]
    return sorted(found, key=lambda option: option.rank, reverse=True)


def best_of_each(ranked: list[Option]) -> list[Option]:
    """The best window of each strategy, in the order of the ranking."""
    best: dict[str, Option] = {}
    for option in ranked:
        best.setdefault(option.spec, option)
    return list(best.values())


def _option(question: Question, spec: str, window: int) -> Option:
    growth, step, context = question.growths[spec], question.layout.data, question.context
    batch = question.batch
    if not batch:
        batch = step * largest(lambda n: question.allows(spec, n * step, context, window), 2**20)
    refusal = _refusal(question, spec, batch or step, window)
    batch = batch or step
    return Option(
        spec=spec,
        prediction=question.predict(spec, batch, context, window),
        needed_bytes=growth.needed_bytes(batch, context, window),
        largest_batch=growth.largest_batch(question.limit_bytes, context, window),
        refusal=refusal,
    )


def _refusal(question: Question, spec: str, batch: int, window: int) -> str:
    if question.profile(spec) is None:
        return f"acceptance unknown: give --acceptance {spec.partition(':')[0]}=..."
    over = question.growths[spec].needed_bytes(batch, question.context, window) - question.limit_bytes
    if over > 0:
        return f"does not fit: {over / GiB:.2f} GiB too much at batch {batch}"
    latency_s = question.predict(spec, batch, question.context, window).latency_s
    if question.latency_s is not None and latency_s > question.latency_s:
        return f"too slow: {latency_s * 1e3:.2f} ms a token at batch {batch}"
    return ""


def ranking_by_size(question: Question, contexts: tuple[int, ...], batches: tuple[int, ...]) -> Iterator[list[str]]:
    """The strategy and window of the largest speedup at each context and batch, a row a context."""
    for context in contexts:
        row = []
        for batch in batches:
            fits = [
                (question.predict(spec, batch, context, window), spec)
                for spec in question.growths
                if question.profile(spec) is not None
                for window in question.windows_of(spec)
                if question.growths[spec].needed_bytes(batch, context, window) <= question.limit_bytes
            ]
            best, spec = max(fits, key=lambda pair: pair[0].speedup, default=(None, ""))
            row.append("does not fit" if best is None else _cell(best, spec))
        yield row


def _cell(best: Prediction, spec: str) -> str:
    return spec if spec == PLAIN else f"{spec} {best.window} ({best.speedup:.2f} x)"


def ways_out(question: Question, spec: str, window: int) -> list[str]:
    """What could give way, one thing at a time, so that a strategy meets the bounds."""
    batch, context, growth = question.batch or question.layout.data, question.context, question.growths[spec]
    step = question.layout.data
    ways = []
    fewer = step * largest(lambda n: question.allows(spec, n * step, context, window), batch // step)
    shortest = growth.nodes(window) + 1
    shorter = largest(lambda slots: slots < shortest or question.allows(spec, batch, slots, window), context)
    if fewer:
        ways.append(f"batch: {fewer} instead of {batch}")
    if shorter >= shortest:
        ways.append(f"context: {shorter} instead of {context}")
    weights = growth.account(step, context, window).phase_bytes("verify", "weights")
    for text, other in _precisions(question):
        if other.allows(spec, batch, context, window):
            ways.append(f"precision: {text}")
    if spec != PLAIN and question.allows(PLAIN, batch, context, 0):
        ways.append("drafter: `none` meets the bounds")
    smaller = [k for k in question.windows_of(spec) if k < window and question.allows(spec, batch, context, k)]
    if smaller:
        ways.append(f"window: {max(smaller)} instead of {window}")
    if not ways:
        ways.append(_more_devices(question, spec, batch, context, window))
        if weights > question.limit_bytes:
            ways.insert(0, f"neither batch nor context: weights alone are {weights / GiB:.2f} GiB")
    return ways


def _precisions(question: Question) -> Iterator[tuple[str, Question]]:
    if question.cache_dtype != FP8:
        yield f"KV in {FP8}", replace(question, cache_dtype=FP8)
    if question.dtype == "float32":
        yield "weights and KV in bfloat16", replace(question, dtype="bfloat16")
    elif question.dtype != FP8:
        yield f"the target's linear layers in {FP8}", replace(question, dtype=FP8)
        yield f"the target's linear layers and KV in {FP8}", replace(question, dtype=FP8, cache_dtype=FP8)


def _more_devices(question: Question, spec: str, batch: int, context: int, window: int) -> str:
    config, data = question.growths[spec].strategy.model.config, question.layout.data
    for devices in (data * factor for factor in (2, 4, 8, 16, 32, 64)):
        wider = replace(question, layout=mesh.split(devices, config.num_kv_heads, data=data))
        splits = wider.layout.splits(config.intermediate_size)
        if devices > question.layout.devices and splits and wider.allows(spec, batch, context, window):
            return f"devices: {devices} instead of {question.layout.devices}"
    return f"nothing of batch, context, precision, drafter or up to {64 * data} devices by itself"
