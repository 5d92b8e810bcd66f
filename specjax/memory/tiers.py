"""What may leave the device's memory, at which rate it must travel, and the queue that grows if it can't.

    may leave   committed KV     written out as tokens are accepted: tokens/s x bytes a token; it must come back
                                 for every round that attends to it, and a round attends to all of it
                drafter weights  idle between drafts: all of them come in before each draft
    must stay   the live window, which a verdict may roll back; probabilities and logits; the target's weights

A link that is slower than what is asked of it leaves a queue that grows by the difference, rate in - rate out,
for as long as the load lasts. All figures are predictions, for one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specjax.memory.account import Account
from specjax.memory.hardware import Device
from specjax.memory.roofline import Prediction, RoundTime


@dataclass(frozen=True)
class Move:
    """Bytes that could lie in a slower tier."""

    name: str
    freed_bytes: int  # of the device's memory, while they are away
    rate_bytes_per_s: float  # that the link must carry for the device not to wait
    peak_bytes: int = 0  # by which the device's peak falls: what is brought back for a phase is held in it


def moves(account: Account, prediction: Prediction, context: int) -> Iterator[Move]:
    """All that may leave, for a strategy at full load."""
    kv, weights = account.bytes("target KV, committed"), account.bytes("drafter weights")
    per_token = (kv + account.bytes("target KV, speculative window")) / (prediction.batch * context)
    rounds_per_s = 1 / prediction.time.round_s
    yield Move("KV, out as accepted", kv, prediction.tokens_per_s * per_token)
    yield Move("KV, back each round", kv, kv * rounds_per_s)
    if weights:
        falls = account.needed_bytes - account.offloaded().needed_bytes
        yield Move("weights, in each draft", weights, weights * rounds_per_s, falls)


def queue_growth(rate_in: float, rate_out: float) -> float:
    """Bytes a second by which a queue grows: rate in - rate out, or nothing."""
    return max(0.0, rate_in - rate_out)


def offloaded(prediction: Prediction, weights_bytes: int, link_bytes_per_s: float) -> Prediction:
    """The same strategy with its drafter's weights fetched before each draft, without overlap."""
    time = prediction.time
    return replace(prediction, time=RoundTime(time.draft_s + weights_bytes / link_bytes_per_s, time.verify_s))


def links(device: Device) -> dict[str, float]:
    """Rates to the tiers that are known."""
    rates = {"host memory": device.host_bytes_per_s, "NVMe": device.nvme_bytes_per_s}
    return {name: rate for name, rate in rates.items() if rate}
