"""Curves over context or batch, and the sizes at which something changes: exact, from a few traced accounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from specjax.cli.sizes import parse_range, powers
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


def parse(texts: Sequence[str], longest: int) -> list[Axis]:
    """From `context=1k..128k` and `batch=1..256`.

    Raises:
      ValueError: another axis, a malformed range, a context beyond the model's.
    """
    axes = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in AXES:
            raise ValueError(f"sweep {text!r}: give {' or '.join(f'{axis}=LOW..HIGH' for axis in AXES)}")
        low, high = parse_range(value)
        if name == "context" and high > longest:
            raise ValueError(f"sweep {text!r}: the target was made for contexts of at most {longest} tokens")
        axes.append(Axis(name, low, high))
    return axes


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


def table(curves: Sequence[Curve], title: str) -> Table:
    """Where something changes, a strategy and axis a row."""
    names = list(dict.fromkeys(name for curve in curves for name in curve.crossings))
    shown = Table(title=title, caption="the smallest size at which it is so; -: not within the sweep")
    for name in ("strategy", "axis", *names):
        shown.add_column(name, justify="left" if name in ("strategy", "axis") else "right")
    for curve in curves:
        ends = f"{curve.axis} {curve.sizes[0]} to {curve.sizes[-1]}"
        found = (curve.crossings.get(name, "") for name in names)
        shown.add_row(curve.strategy, ends, *("-" if size is None else str(size) for size in found))
    return shown


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
