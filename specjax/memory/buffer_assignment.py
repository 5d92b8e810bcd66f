"""What a compiler put where: XLA's own list of allocations, every byte with the operation that made it; or its refusal.

`memory_analysis()` gives one number for all temporaries, and on a TPU adds the on-chip memory to them. The
buffer assignment that XLA writes beside the program (`xla_dump_to`) says more:

    allocation 404: size 885248, preallocated-temp:
     value: <725 compare_select_fusion.3 @0> (size=49152,offset=147456): f32[1,1,12288]{2,1,0:T(1,128)}
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(?:, color (\d+))?, (.*)")
_VALUE = re.compile(r" value: <\d+ (\S+?)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{.*?op_name=\"([^\"]*)\"", re.MULTILINE)
_NEXT = "-buffer-assignment-values.txt"
LOOP = "jit_run"
ROUND = re.compile(r".*jit\(run\)/(?:while/body/)?")
"""What stands before the name of an operation of the round."""
_NUMBER = re.compile(r"(?:\.(?:clone|\d+))+$")
TABLE_BYTES = 2**14
"""A tuple of buffers has a table of their addresses; a TPU's compiler aligns each, of some 100 bytes, to 16 KiB."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES = r"([\d.]+)([KMGT]?)B?"
_NEEDED = (
    re.compile(rf"Used {_BYTES} of {_BYTES} hbm"),  # with a list of allocations
    re.compile(rf"temporaries \({_BYTES}\) exceeds available HBM \({_BYTES}\)"),  # libtpu 0.0.42: arguments included
)
_PART = re.compile(rf"^\s+(reserved|program|arguments)\s+{_BYTES}", re.MULTILINE)
_LISTED = re.compile(r"^\s+\d+\. Size: (?P<body>.*?)(?=^\s+=====|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Assignment:
    """Bytes of one device. What lies on the chip itself (a TPU's vector memory) is not in its HBM."""

    argument_bytes: int
    temp_bytes: int  # in HBM, with constants and results that are no donated argument
    on_chip_bytes: int
    temporaries: tuple[tuple[str, int], ...]  # by operation and shape, the largest first: their sum is `temp_bytes`

    @property
    def total_bytes(self) -> int:
        """All that the program holds in HBM."""
        return self.argument_bytes + self.temp_bytes


def dump_options(folder: str) -> dict[str, Any]:
    """Options that make a compiler write its assignment there."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def read_dump(folder: str) -> Assignment | None:
    """The assignment of the round that was dumped there; `None` while there is none.

    Another file is begun after it (of hundreds of megabytes: no need to wait for its end): where that is, the
    assignment is complete. Compilers make code only then.
    """
    for following in Path(folder).rglob(f"*{_NEXT}"):
        if LOOP in following.name:
            stem = str(following).removesuffix(_NEXT)
            return parse(Path(stem + "-buffer-assignment.txt").read_text(), Path(stem + ".txt").read_text())
    return None


def parse(text: str, program: str = "") -> Assignment:
    """Read an assignment.

    Args:
      text: the file `*buffer-assignment.txt`.
      program: the compiled program, for the names that its operations had when they were traced.
    """
    names = {name: ROUND.sub("", path) for name, path in _OPERATION.findall(program)}
    arguments = on_chip = temporary = 0
    named: Counter[str] = Counter()
    for block in re.split(r"^(?=allocation )", text.partition("\n\nTotal bytes")[0], flags=re.MULTILINE)[1:]:
        found = _ALLOCATION.match(block)
        assert found is not None
        size, color, what = int(found[1]), int(found[2] or 0), found[3]
        if color:
            on_chip += size if color == 1 else 0
        elif what.startswith("parameter"):
            arguments += size
        else:
            temporary += size
            named += _name_bytes(size, block, names)
    return Assignment(arguments, temporary, on_chip, tuple(named.most_common()))


def _name_bytes(size: int, block: str, names: dict[str, str]) -> Counter[str]:
    """Each byte of an allocation under the largest array that lies there at some time.

    Where none ever does, there is a table of addresses with the bytes that align it, or nothing.
    """
    arrays, tables = [], []
    for name, bytes_, offset, shape in _VALUE.findall(block):
        operation = _NUMBER.sub("", names.get(name) or name)
        if shape.startswith("("):
            tables.append((int(offset), f"{operation}: addresses"))
        else:
            arrays.append((int(bytes_), int(offset), f"{operation}: {shape.partition('{')[0]}"))
    found, free = Counter[str](), [(0, size)]
    for bytes_, offset, name in sorted(arrays, key=lambda array: -array[0]):
        free = _take(free, offset, offset + bytes_, name, found)
    for offset, name in dict(sorted(tables, reverse=True)).items():
        free = _take(free, offset, offset + TABLE_BYTES, name, found)
    found["alignment"] += sum(end - begin for begin, end in free)
    return +found


def _take(free: list[tuple[int, int]], begin: int, end: int, name: str, found: Counter[str]) -> list[tuple[int, int]]:
    """What is left of the free parts after `begin .. end`; what was free of it is added to `found[name]`."""
    left = []
    for low, high in free:
        inside = max(low, begin), min(high, end)
        if inside[0] >= inside[1]:
            left.append((low, high))
            continue
        found[name] += inside[1] - inside[0]
        left += [part for part in ((low, inside[0]), (inside[1], high)) if part[0] < part[1]]
    return left


@dataclass(frozen=True)
class MemoryRefusal:
    """A compiler's refusal for want of memory. Bytes are rounded, as it prints them; `None` where it does not say."""

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


def out_of_memory(error: Exception) -> str:
    """A compiler's refusal for want of memory, in its words; any other error goes on."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return str(error)


def read_refusal(message: str) -> MemoryRefusal:
    """Read the text of a RESOURCE_EXHAUSTED."""
    found = next((match for pattern in _NEEDED if (match := pattern.search(message))), None)
    needed, limit = (_bytes(*found.groups()[:2]), _bytes(*found.groups()[2:])) if found else (None, None)
    parts = tuple((name, _bytes(size, unit)) for name, size, unit in _PART.findall(message))
    return MemoryRefusal(needed, limit, parts, tuple(_allocation(match["body"]) for match in _LISTED.finditer(message)))


def _allocation(body: str) -> tuple[str, int]:
    size = re.match(_BYTES, body)
    operator = re.search(r'op_name="([^"]*)"', body)
    shape = re.search(r"Shape: ([^\s{]+)", body)
    kind = re.search(r"Allocation type: (.*)", body)
    name = ROUND.sub("", operator[1]) if operator else kind[1] if kind else "?"
    return f"{name}: {shape[1] if shape else '?'}", _bytes(size[1], size[2]) if size else 0


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
