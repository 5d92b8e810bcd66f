"""Curves over context or batch, and the sizes at which something changes: exact, from a few traced accounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specjax.memory.account import Account
from specjax.memory.growth import Growth, largest

AXES = ("context", "batch")
POINTS = 33


@dataclass(frozen=True)
class Axis:
    """What is swept, and between which ends, both included."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class Curve:
    """One strategy along one axis. `crossings` holds the smallest size at which each thing is so, or `None`."""

    strategy: str
    axis: str
    sizes: tuple[int, ...]
    needed_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]  # the target's
    added_bytes: tuple[int, ...]  # to none
    target_weights_bytes: int
    drafter_weights_bytes: int
    crossings: Mapping[str, int | None]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def curve(growth: Growth, axis: Axis, batch: int, context: int, limit_bytes: int) -> Curve:
    """A strategy's bytes along an axis; the other size stays."""
    step = growth.layout.data if axis.name == "batch" else 1
    shortest = growth.nodes() + 1
    if axis.name == "context" and axis.high < shortest:
        raise ValueError(f"sweep to context {axis.high}: {growth.strategy.drafter} needs {shortest} slots at least")
    first = max(axis.low, shortest) if axis.name == "context" else -(-axis.low // step) * step

    def at(size: int) -> Account:
        return growth.account(size, context) if axis.name == "batch" else growth.account(batch, size)

    sizes = tuple(dict.fromkeys(-(-size // step) * step for size in powers(first, axis.high, POINTS)))
    accounts = [at(size) for size in sizes]
    ends = accounts[0]
    return Curve(
        strategy=growth.strategy.drafter,
        axis=axis.name,
        sizes=sizes,
        needed_bytes=tuple(account.needed_bytes for account in accounts),
        kv_bytes=tuple(target_kv(account) for account in accounts),
        added_bytes=tuple(sum(account.added_bytes.values()) for account in accounts),
        target_weights_bytes=ends.bytes("target weights"),
        drafter_weights_bytes=ends.bytes("drafter weights"),
        crossings={
            name: _first(at, test, first, axis.high, step) for name, test in crossings(ends, limit_bytes).items()
        },
    )


def powers(low: int, high: int, count: int = 64) -> tuple[int, ...]:
    """Sizes from `low` to `high`, both included, with equal ratios: at most `count` of them."""
    if low == high:
        return (low,)
    steps = count - 1
    return tuple(sorted({round(low * (high / low) ** (i / steps)) for i in range(count)}))


def target_kv(account: Account) -> int:
    """The target's cache, window included."""
    return account.bytes("target KV, committed") + account.bytes("target KV, speculative window")


def crossings(account: Account, limit_bytes: int) -> dict[str, Callable[[Account], bool]]:
    """What may become true as a batch or context grows, for a strategy of these weights."""
    found: dict[str, Callable[[Account], bool]] = {
        "KV outgrows the target's weights": lambda a: target_kv(a) > a.bytes("target weights"),
    }
    if account.bytes("drafter weights"):
        found["drafter weights stop mattering"] = lambda a: beside_weights(a) > a.bytes("drafter weights")
        found["KV outgrows the drafter's weights"] = lambda a: target_kv(a) > a.bytes("drafter weights")
    found["no longer fits"] = lambda a: a.needed_bytes > limit_bytes
    return found


def beside_weights(account: Account) -> int:
    """What a strategy adds to `none` other than weights: KV, state, buffers."""
    return sum(size for group, size in account.added_bytes.items() if group != "weights")


def _first(at: Callable[[int], Account], test: Callable[[Account], bool], low: int, high: int, step: int) -> int | None:
    """The smallest size from `low` to `high` in steps for which a test holds; it holds from some size on."""
    steps = (high - low) // step + 1
    count = largest(lambda n: not test(at(low + (n - 1) * step)), steps)
    return low + count * step if count < steps else None
