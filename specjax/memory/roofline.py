"""Predicted time of a round, and what speculation is worth: every figure here is a prediction, none a measurement.

    part of a phase     max(bytes / bandwidth, operations / rate), exchange between devices: bytes / link rate
    phase               the sum of its parts, which follow each other
    round               draft + verify
    tokens a round      E of `specjax.memory.acceptance`
    speedup             E x round of `none` / round
    pays above          round / round of `none`: the acceptance length at which nothing is won

Rates are peaks and launches cost nothing here, so times are lower bounds; a ratio of two such times is what the
model is for. With one cost ratio c = draft step / round of `none`, and verification as dear as a plain round,
the speedup is (1 - alpha^(K + 1)) / ((1 - alpha) (K c + 1)): Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8.
"""

from __future__ import annotations

from dataclasses import dataclass

from specjax.memory.acceptance import Profile
from specjax.memory.growth import Growth
from specjax.memory.hardware import Device
from specjax.memory.jaxpr_traffic import PARTS, Traffic

FORMULA = (
    "predicted: each part of a round takes max(bytes / bandwidth, operations / rate); "
    "speedup = tokens a round x none's round / round"
)


@dataclass(frozen=True)
class RoundTime:
    """Predicted seconds of a round's halves."""

    draft_s: float
    verify_s: float

    @property
    def round_s(self) -> float:
        """Both."""
        return self.draft_s + self.verify_s


def part_s(traffic: Traffic, phase: str, part: str, device: Device) -> float:
    """Seconds of one part. A link of unknown rate costs nothing, which the plan says."""
    size = traffic.bytes(phase, part)
    if part == "exchange":
        return size / device.link_bytes_per_s if device.link_bytes_per_s else 0.0
    return max(size / device.bandwidth_bytes_per_s, traffic.of(phase, part, "flop") / device.bf16_flop_per_s)


def round_time(traffic: Traffic, device: Device) -> RoundTime:
    """Seconds of a round."""
    draft, verify = (sum(part_s(traffic, phase, part, device) for part in PARTS) for phase in ("draft", "verify"))
    return RoundTime(draft, verify)


def bound(traffic: Traffic, phase: str, device: Device) -> str:
    """What limits a phase: memory or arithmetic."""
    memory = traffic.memory_bytes(phase) / device.bandwidth_bytes_per_s
    return "arithmetic" if traffic.flop(phase) / device.bf16_flop_per_s > memory else "memory"


def improvement_factor(alpha: float, window: int, cost: float) -> float:
    """Leviathan et al. 2023, theorem 3.8; `cost` is a draft step by a plain round."""
    return Profile.constant(alpha).expected_tokens(window) / (window * cost + 1)


@dataclass(frozen=True)
class Prediction:
    """One strategy with one window at one batch and context, beside plain decoding there."""

    window: int
    time: RoundTime
    plain_s: float  # a round of `none` at the same batch and context
    tokens: float  # a round
    batch: int

    @property
    def speedup(self) -> float:
        """Against `none` at the same batch and context."""
        return self.tokens * self.plain_s / self.time.round_s

    @property
    def pays_above(self) -> float:
        """The acceptance length at which speculation wins nothing."""
        return self.time.round_s / self.plain_s

    @property
    def latency_s(self) -> float:
        """Seconds a token, of one row."""
        return self.time.round_s / self.tokens

    @property
    def tokens_per_s(self) -> float:
        """Of all rows together."""
        return self.batch / self.latency_s


def predict(
    strategy: Growth, plain: Growth, profile: Profile | None, device: Device, batch: int, context: int, window: int
) -> Prediction:
    """The prediction for one window; without a profile, one token a round. A tree's positions are its depths.

    On a mesh with `data` copies of the model, rates and bytes are those of one device, tokens of all.
    """
    time = round_time(strategy.traffic(batch, context, window), device)
    plain_s = round_time(plain.traffic(batch, context), device).round_s
    tokens = profile.expected_tokens(strategy.depth(window)) if profile else 1.0
    return Prediction(window, time, plain_s, tokens, batch)
