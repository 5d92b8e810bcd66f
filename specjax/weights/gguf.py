"""Weights from a GGUF file, dequantised block by block with the `gguf` package.

llama.cpp's converter permutes the rows of q and k for architecture `llama`, so that its rotary embedding
turns neighbouring pairs (2i, 2i+1); ours turns (i, i + D/2), as Hugging Face's does. The permutation is
undone on reading. qwen2 and qwen3 are stored unpermuted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map, quants
from jaxtyping import Array

from specjax.model import Llama
from specjax.model.config import from_gguf
from specjax.text import Tokenizer
from specjax.weights import gguf_vocabulary
from specjax.weights.checkpoint import Checkpoint, DamagedFile, Wanted, flatten, stream
from specjax.weights.gguf_header import TensorEntry, read_header

_READABLE = ("F32", "F16", *(kind.name for kind in GGMLQuantizationType if hasattr(quants, kind.name)))


class GGUF(Checkpoint):
    """A GGUF file, or the first of those that a large one was split into."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata, self._stored = read_header(path)
        self._parts = (path, *_other_parts(path, self.metadata.get("split.count", 1)))
        for part in self._parts[1:]:
            self._stored |= read_header(part)[1]
        for name, entry in self._stored.items():
            if entry.type.name not in _READABLE:
                raise ValueError(
                    f"tensor {name} in {path} is {entry.type.name}: specjax reads {', '.join(_READABLE)}; "
                    "take another file of the same model"
                )
        factors = self._stored.pop("rope_freqs.weight", None)
        try:
            self.config = from_gguf(
                self.metadata,
                {name: entry.shape for name, entry in self._stored.items()},
                () if factors is None else self._read(factors, 0, factors.shape[0]).tolist(),
            )
        except KeyError as error:
            raise ValueError(f"{path} does not describe a language model: {error.args[0]} is missing") from error
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path} does not describe a language model ({error}): fetch it again") from error

    @functools.cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        """By their Hugging Face names; what is no part of the model keeps its own, and is reported as left over."""
        names = get_tensor_name_map(MODEL_ARCH[self._architecture.upper()], self.config.num_layers)
        ours = flatten(Llama(self.config).shapes())
        known = {names.get_name(name, try_suffixes=(".weight", ".bias")): name for name in ours}
        return {known.get(name, name): entry for name, entry in self._stored.items()}

    @property
    def _architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def files(self) -> tuple[Path, ...]:
        return self._parts

    def tokenizer(self) -> Tokenizer:
        try:
            return gguf_vocabulary.build(self.metadata)
        except ValueError:
            raise
        except Exception as error:  # a key or an id that is not there; `tokenizers` raises the bare class
            reason = f"{type(error).__name__}: {error}"
            raise DamagedFile(f"the vocabulary in {self.path} is incomplete ({reason}): fetch it again") from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        return stream(self._rows, wanted, self.path)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        entry = self._entries[name]
        projection = name.split(".")[-2]
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(projection)
        if heads is None or self._architecture != "llama":
            return self._read(entry, start, stop)
        rows = unpermuted(entry.shape[0], heads)[start:stop]
        first = int(rows.min())
        return self._read(entry, first, int(rows.max()) + 1)[rows - first]

    def _read(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Rows `start .. stop - 1` in float32. Plain reads: pages of a mapped file would count as memory in use."""
        flat = len(entry.shape) == 1  # one row, whose blocks are not cut
        first, count = (0, 1) if flat else (start, stop - start)
        offset_bytes = entry.offset_bytes + first * entry.row_bytes
        data = np.fromfile(entry.file, np.uint8, count * entry.row_bytes, offset=offset_bytes)
        rows = _dequantize(data.reshape(count, entry.row_bytes), entry.type)
        return rows[0, start:stop] if flat else rows


def _other_parts(path: Path, count: Any) -> list[Path]:
    if count == 1:
        return []
    if type(count) is not int or not 1 < count < 10_000 or not path.name.endswith(f"-00001-of-{count:05}.gguf"):
        raise ValueError(f"{path} is one of {count!r:.40} parts of a model: give the first, ...-00001-of-0000N.gguf")
    whole = path.name.removesuffix(f"-00001-of-{count:05}.gguf")
    parts = [path.with_name(f"{whole}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    for part in parts:
        if not part.exists():
            raise DamagedFile(f"{part} is missing: all parts of {path.name} must stand beside it")
    return parts


def _dequantize(table: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """As `quants.dequantize`, which goes by 16 rows at a time: three times slower on small blocks."""
    quantization = getattr(quants, kind.name, None)
    if quantization is not None:
        quantization.init_grid()  # of the kinds that look their values up
    return quants.dequantize(table, kind) if quantization is None else quantization.dequantize_rows(table)


def unpermuted(rows: int, heads: int) -> np.ndarray:
    """The stored row of each row: within a head, the first half stands at even places, the second at odd ones."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
