"""Safetensors files: where their tensors stand, their rows, and how to write one.

The format is eight bytes of length, a JSON header and the data (github.com/huggingface/safetensors). Written
here rather than by the library so that one tensor at a time is in host memory, in any of JAX's dtypes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from specjax.weights.checkpoint import DamagedFile, Wanted, stream

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn), "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype(bool),
}  # fmt: skip
"""The format's names of numpy's and JAX's dtypes."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor stands."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start .. stop - 1` as they are. A plain read: pages of a mapped file would count as memory in use."""
        dtype, width = DTYPES[self.dtype], math.prod(self.shape[1:])
        offset_bytes = self.offset_bytes + start * width * dtype.itemsize
        rows = np.fromfile(self.file, dtype, (stop - start) * width, offset=offset_bytes)
        return rows.reshape(-1, *self.shape[1:])


@dataclass(frozen=True)
class Tensors:
    """What a file holds, or several."""

    origin: Path
    entries: Mapping[str, Entry]

    def outline(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes, without reading a tensor."""
        return {name: jax.ShapeDtypeStruct(e.shape, DTYPES[e.dtype]) for name, e in self.entries.items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """The wanted ones in the wanted dtypes; each is checked to be finite."""
        return stream(lambda name, start, stop: self.entries[name].rows(start, stop), wanted, self.origin)


def read_header(path: Path) -> dict[str, Entry]:
    """Where each tensor stands; the library checks that the file holds what its header promises.

    Raises:
      DamagedFile: it does not.
      ValueError: a dtype that is not among `DTYPES`.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise DamagedFile(f"{path} is truncated or damaged ({error}): fetch it again") from error
    with path.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size_bytes))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"tensor {name} in {path} is {entry['dtype']}: specjax reads {', '.join(DTYPES)}")
    return {
        name: Entry(path, entry["dtype"], tuple(entry["shape"]), 8 + size_bytes + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def write(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write arrays, from whatever device they are on, one after another."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {}, 0
    for name, tensor in tensors.items():
        offsets = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": names[np.dtype(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned, as the format asks
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(jax.device_get(tensor)).tobytes())
