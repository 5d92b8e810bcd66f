"""The header of a GGUF file: its metadata, and where each tensor stands.

`gguf.GGUFReader` makes an array object of every token and merge, which takes five seconds for a vocabulary
of 49,152; this reads the same header in a tenth of a second. Names and sizes of the types are the package's.

Source: the GGUF specification, versions 2 and 3 (ggml/docs/gguf.md).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

from specjax.weights.checkpoint import DamagedFile

_DAMAGE = (struct.error, ArithmeticError, MemoryError, RecursionError, TypeError, ValueError)
"""What reading nonsense as lengths, counts, kinds or text raises."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor stands in the file. `shape` has rows first, as numpy does; GGUF writes the reverse."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset_bytes: int
    row_bytes: int  # along the last axis
    file: Path

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Read metadata and tensor entries, and check that the file holds every byte they promise.

    Raises:
      DamagedFile: not a GGUF file, a version or type that is not known, or a truncated or damaged file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = _parse(_Cursor(data), path)
            size_bytes = len(data)
    except _DAMAGE as error:
        raise DamagedFile(f"{path} is no readable GGUF file ({error}): fetch it again") from error
    for name, entry in tensors.items():
        if entry.offset_bytes + entry.size_bytes > size_bytes:
            raise DamagedFile(
                f"{path} is truncated: tensor {name} ends at byte {entry.offset_bytes + entry.size_bytes}, "
                f"the file has {size_bytes}; fetch it again"
            )
    return metadata, tensors


@dataclass
class _Cursor:
    data: mmap.mmap
    at: int = 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.raw(self.take("Q")).decode()

    def raw(self, size_bytes: int) -> bytes:
        if size_bytes > len(self.data) - self.at:
            raise ValueError(f"{size_bytes} bytes are promised at byte {self.at} of {len(self.data)}")
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at]

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.numbers(kind, 1)[0]
        item, count = GGUFValueType(self.take("I")), self.take("Q")
        if item in GGUFReader.gguf_scalar_to_np:
            return self.numbers(item, count)
        if count > len(self.data):
            raise ValueError(f"an array of {count} items is promised at byte {self.at}")
        return [self.value(item) for _ in range(count)]

    def numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(GGUFReader.gguf_scalar_to_np[kind])
        return np.frombuffer(self.raw(count * dtype.itemsize), dtype).tolist()


def _parse(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    if cursor.raw(4) != b"GGUF":
        raise ValueError("it does not begin with the letters GGUF")
    version = cursor.take("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not 2 or 3 (little-endian)")
    tensor_count, value_count = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.take("I")))
    entries: dict[str, TensorEntry] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
        kind = GGMLQuantizationType(cursor.take("I"))
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} {shape} is no whole number of {kind.name} blocks of {block}")
        entries[name] = TensorEntry(shape, kind, cursor.take("Q"), shape[-1] // block * block_bytes, path)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"general.alignment is {alignment!r:.40}")
    base = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: dataclasses.replace(entry, offset_bytes=base + entry.offset_bytes) for name, entry in entries.items()
    }
