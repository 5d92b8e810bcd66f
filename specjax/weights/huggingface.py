"""Weights from a Hugging Face checkpoint: a folder with `config.json` and safetensors, sharded or not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxtyping import Array

from specjax.model import ModelConfig
from specjax.model.config import from_huggingface
from specjax.text import Tokenizer, read_json
from specjax.weights.checkpoint import Checkpoint, DamagedFile, Wanted
from specjax.weights.safetensors_file import Entry, Tensors, read_header

_DTYPES = ("F64", "F32", "F16", "BF16")
_PREFIX = re.compile(r"^((model|language_model)\.)+")
"""Of a decoder by itself, or of the one that stands in a larger model."""
_DESCRIPTIONS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_config(path: Path) -> ModelConfig:
    """The decoder that a `config.json` describes.

    Raises:
      DamagedFile: what is no JSON.
      ValueError: an entry that is missing or makes no sense, with its name.
    """
    description = read_json(path)
    if quantization := description.get("quantization_config"):
        known = isinstance(quantization, dict)
        method = quantization.get("quant_method", "unknown") if known else f"{quantization!r:.40}"
        raise ValueError(f"{path.parent} is quantised ({method}): take the unquantised checkpoint, or a GGUF file")
    try:
        return from_huggingface(description)
    except KeyError as error:
        raise ValueError(f"{path} lacks {error.args[0]}: it describes no model that specjax has") from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path} describes no model that specjax has: {error}") from error


class HuggingFace(Checkpoint):
    """A checkpoint folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        config = read_config(folder / "config.json")
        self._shards = _shards(folder)
        headers = [read_header(shard).items() for shard in self._shards]
        self._entries = {_PREFIX.sub("", name): entry for header in headers for name, entry in header}
        if "lm_head.weight" not in self._entries and "tie_word_embeddings" not in read_json(folder / "config.json"):
            config = dataclasses.replace(config, tied_embeddings=True)
        self._tokenizer = Tokenizer.from_directory(folder) if (folder / "tokenizer.json").exists() else None
        if self._tokenizer is not None:  # rows of the embedding beyond the tokenizer's ids are padding
            size = min(config.vocab_size, self._tokenizer.vocab_size)
            config = dataclasses.replace(config, vocab_size=size, padded_vocab_size=config.vocab_size)
        self.config = config

    @property
    def files(self) -> tuple[Path, ...]:
        """Shards first, then what describes them."""
        beside = (self.folder / name for name in _DESCRIPTIONS)
        return (*self._shards, *(path for path in beside if path.exists()))

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer or Tokenizer.from_directory(self.folder)  # which says what is missing

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of all shards. Rotary frequencies, which old checkpoints store, follow from the config.

        Raises:
          ValueError: the config says that the head is the embedding, and the file holds another one.
        """
        names = [name for name in self._entries if not name.endswith("rotary_emb.inv_freq")]
        if self.config.tied_embeddings and "lm_head.weight" in names:
            if not _same(self._entries["lm_head.weight"], self._entries.get("embed_tokens.weight")):
                raise ValueError(
                    f"lm_head.weight in {self.folder} differs from embed_tokens.weight although config.json ties them: "
                    'set "tie_word_embeddings": false there if the head is meant'
                )
            names.remove("lm_head.weight")
        return {name: self._entries[name].shape for name in names}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        for name in wanted:
            entry = self._entries[name]
            if entry.dtype not in _DTYPES:
                raise ValueError(f"tensor {name} in {entry.file} is {entry.dtype}: specjax reads {', '.join(_DTYPES)}")
        return Tensors(self.folder, self._entries).tensors(wanted)


def _same(one: Entry, other: Entry | None) -> bool:
    if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    blocks = ((at, min(at + 4096, one.shape[0])) for at in range(0, one.shape[0], 4096))
    return all(one.rows(*block).tobytes() == other.rows(*block).tobytes() for block in blocks)


def _shards(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise DamagedFile(f"{index} names no shards: fetch the checkpoint again")
        outside = [name for name in names.values() if Path(name).name != name]
        if outside:
            raise DamagedFile(f"{index} names {outside[0]!r:.80}: shards stand beside it, in no other folder")
        shards = tuple(folder / name for name in sorted(set(names.values())))
    else:
        shards = (folder / "model.safetensors",)
    for shard in shards:
        if not shard.exists():
            raise DamagedFile(
                f"{shard} is missing: fetch the checkpoint again; if it has .bin or .pt files only, "
                "convert it with transformers' save_pretrained"
            )
    return shards
