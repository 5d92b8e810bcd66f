"""Weights from a GGUF file, dequantised block by block with the `gguf` package.

llama.cpp's converter permutes the rows of q and k for architecture `llama`, so that its rotary embedding
turns neighbouring pairs (2i, 2i+1); ours turns (i, i + D/2), as Hugging Face's does. The permutation is
undone on reading. qwen2 and qwen3 are stored unpermuted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants
from jaxtyping import Array

from specjax.model import ModelConfig
from specjax.model.config import from_gguf
from specjax.text import Tokenizer
from specjax.weights import gguf_vocabulary
from specjax.weights.checkpoint import DamagedFile, Wanted, stream
from specjax.weights.gguf_header import TensorEntry, read_header

_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUF:
    """Reader of one GGUF file."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata, entries = read_header(path)
        for name, entry in entries.items():
            if entry.type.name not in _READABLE:
                raise ValueError(
                    f"tensor {name} in {path} is {entry.type.name}: specjax reads {', '.join(_READABLE)}; "
                    "take another file of the same model"
                )
        factors = entries.pop("rope_freqs.weight", None)
        try:
            self.config: ModelConfig = from_gguf(
                self.metadata,
                {name: entry.shape for name, entry in entries.items()},
                None if factors is None else float(self._read(factors, 0, factors.shape[0]).max()),
            )
        except KeyError as error:
            raise ValueError(f"{path} does not describe a language model: {error.args[0]} is missing") from error
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path} does not describe a language model ({error}): fetch it again") from error
        self._entries = {_rename(name): entry for name, entry in entries.items()}

    @property
    def files(self) -> tuple[Path, ...]:
        """The file holds everything."""
        return (self.path,)

    def tokenizer(self) -> Tokenizer:
        """Built from the metadata."""
        try:
            return gguf_vocabulary.build(self.metadata)
        except ValueError:
            raise
        except Exception as error:  # a key or an id that is not there; `tokenizers` raises the bare class
            reason = f"{type(error).__name__}: {error}"
            raise DamagedFile(f"the vocabulary in {self.path} is incomplete ({reason}): fetch it again") from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of the file, by their Hugging Face names."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """Dequantise the wanted tensors, one after another."""
        return stream(self._rows, wanted, self.path)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        entry = self._entries[name]
        projection = name.split(".")[-2]
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(projection)
        if heads is None or self.metadata["general.architecture"] != "llama":
            return self._read(entry, start, stop)
        rows = unpermuted(entry.shape[0], heads)[start:stop]
        first = int(rows.min())
        return self._read(entry, first, int(rows.max()) + 1)[rows - first]

    def _read(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Rows `start .. stop - 1` in float32. Plain reads: pages of a mapped file would count as memory in use."""
        if len(entry.shape) == 1:
            data = np.fromfile(self.path, np.uint8, entry.row_bytes, offset=entry.offset_bytes)
            return _dequantize(data[None], entry.type)[0, start:stop]
        row_bytes, offset_bytes = entry.row_bytes, entry.offset_bytes + start * entry.row_bytes
        data = np.fromfile(self.path, np.uint8, (stop - start) * row_bytes, offset=offset_bytes)
        return _dequantize(data.reshape(-1, row_bytes), entry.type)


def _dequantize(table: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """As `quants.dequantize`, which goes by 16 rows at a time: three times slower on small blocks."""
    quantization = getattr(quants, kind.name, None)
    return quants.dequantize(table, kind) if quantization is None else quantization.dequantize_rows(table)


def unpermuted(rows: int, heads: int) -> np.ndarray:
    """The stored row of each row: within a head, the first half stands at even places, the second at odd ones."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _rename(name: str) -> str:
    """`blk.3.attn_q.weight` is `layers.3.self_attn.q_proj.weight`; unknown names stay, and are reported as extra."""
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("blk."):
        _, index, module = module.split(".", 2)
        prefix = f"layers.{index}."
    return f"{prefix}{_NAMES[module]}.{kind}" if module in _NAMES else name
