"""A compiler's refusal for want of memory, read: what it needed, what there was, and its largest allocations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specjax.memory.buffer_assignment import ROUND

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_NEEDED = (
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),  # with a list of allocations
    re.compile(rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),  # libtpu 0.0.42: arguments included
)
_PART = re.compile(rf"^\s+(reserved|program|arguments)\s+{_SIZE}", re.MULTILINE)
_ALLOCATION = re.compile(r"^\s+\d+\. Size: (?P<body>.*?)(?=^\s+=====|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Refusal:
    """Bytes as the compiler prints them, rounded by it; `None` where it does not say."""

    needed_bytes: int | None
    limit_bytes: int | None
    parts: tuple[tuple[str, int], ...]  # arguments, program, ...
    largest: tuple[tuple[str, int], ...]  # allocations by operation and shape, the largest first

    def __str__(self) -> str:
        """One line."""
        if self.needed_bytes is None or self.limit_bytes is None:
            return "does not fit, and the compiler does not say by how much"
        text = f"needs {_gib(self.needed_bytes)} of {_gib(self.limit_bytes)} GiB"
        if self.parts:
            text += ": " + ", ".join(f"{name} {_gib(size)}" for name, size in self.parts)
        if self.largest:
            text += "; the largest: " + ", ".join(f"{name} {_gib(size)}" for name, size in self.largest[:3])
        return text


def read_refusal(message: str) -> Refusal:
    """Read the text of a RESOURCE_EXHAUSTED."""
    found = next((match for pattern in _NEEDED if (match := pattern.search(message))), None)
    needed, limit = (_bytes(*found.groups()[:2]), _bytes(*found.groups()[2:])) if found else (None, None)
    parts = tuple((name, _bytes(size, unit)) for name, size, unit in _PART.findall(message))
    return Refusal(needed, limit, parts, tuple(_allocation(match["body"]) for match in _ALLOCATION.finditer(message)))


def _allocation(body: str) -> tuple[str, int]:
    size = re.match(_SIZE, body)
    operator = re.search(r'op_name="([^"]*)"', body)
    shape = re.search(r"Shape: ([^\s{]+)", body)
    kind = re.search(r"Allocation type: (.*)", body)
    name = ROUND.sub("", operator[1]) if operator else kind[1] if kind else "?"
    return f"{name}: {shape[1] if shape else '?'}", _bytes(size[1], size[2]) if size else 0


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
