"""Sizes as people write them: `8k`, `1k..128k`, `context=1k..128k`, `30ms`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specjax.memory.sweep import AXES, Axis

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_size(text: str) -> int:
    """A number of at least 1, with k (1024) or m behind it.

    Raises:
      ValueError: anything else.
    """
    found = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if not found or not 1 <= int(found[1]) < 10**12:
        raise ValueError(f"{text[:40]!r}: give a number of at least 1 and below 10^12, as 8192 or 8k")
    return int(found[1]) * _FACTORS[found[2]]


def parse_range(text: str) -> tuple[int, int]:
    """`1k..128k`, or one size for both ends.

    Raises:
      ValueError: not two sizes joined by `..`, or the larger first.
    """
    low, dots, high = text.partition("..")
    try:
        ends = parse_size(low), parse_size(high if dots else low)
    except ValueError as error:
        raise ValueError(f"range {text!r}: give LOW..HIGH, as 1k..128k ({error})") from error
    if ends[0] > ends[1]:
        raise ValueError(f"range {text!r}: the smaller end comes first")
    return ends


def parse_axes(texts: Sequence[str], longest: int) -> list[Axis]:
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


def parse_seconds(text: str) -> float:
    """`30ms`, `0.03s` or `500us`.

    Raises:
      ValueError: no number above zero, or no unit.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(s|ms|us)", text.strip().lower())
    if not found or float(found[1]) == 0:
        raise ValueError(f"latency {text!r}: give seconds a token with their unit, as 30ms or 0.03s")
    return float(found[1]) * _SECONDS[found[2]]
