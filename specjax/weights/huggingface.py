"""Weights from a Hugging Face checkpoint: a folder with `config.json` and safetensors, sharded or not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from specjax.model import ModelConfig
from specjax.model.config import from_huggingface
from specjax.text import Tokenizer, read_json
from specjax.weights.checkpoint import DamagedFile, Wanted, stream

_FLOATS = ("F64", "F32", "F16", "BF16")
_DESCRIPTIONS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


class HuggingFace:
    """Reader of one checkpoint folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        description = read_json(folder / "config.json")
        if "quantization_config" in description:
            method = description["quantization_config"].get("quant_method", "unknown")
            raise ValueError(f"{folder} is quantised ({method}): take the unquantised checkpoint, or a GGUF file")
        try:
            config = from_huggingface(description)
        except KeyError as error:
            raise ValueError(
                f"{folder / 'config.json'} lacks {error.args[0]}: it describes no model that specjax has"
            ) from error
        if (folder / "tokenizer.json").exists():  # rows of the embedding beyond the tokenizer's ids are padding
            size = min(config.vocab_size, self.tokenizer().vocab_size)
            config = dataclasses.replace(config, vocab_size=size, padded_vocab_size=config.vocab_size)
        self.config: ModelConfig = config
        self._shards = _shards(folder)
        self._files = {shard: _open(shard) for shard in self._shards}
        self._places = {_rename(name): (shard, name) for shard, file in self._files.items() for name in file.keys()}  # noqa: SIM118

    @property
    def files(self) -> tuple[Path, ...]:
        """Shards first, then what describes them."""
        beside = (self.folder / name for name in _DESCRIPTIONS)
        return (*self._shards, *(path for path in beside if path.exists()))

    def tokenizer(self) -> Tokenizer:
        """From `tokenizer.json`."""
        return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.folder)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of all shards. Rotary frequencies, which old checkpoints store, follow from the config.

        Raises:
          ValueError: the config says that the head is the embedding, and the file holds another one.
        """
        names = [name for name in self._places if not name.endswith("rotary_emb.inv_freq")]
        if self.config.tied_embeddings and "lm_head.weight" in names:
            if not self._same("lm_head.weight", "embed_tokens.weight"):
                raise ValueError(
                    f"lm_head.weight in {self.folder} differs from embed_tokens.weight although config.json ties them: "
                    'set "tie_word_embeddings": false there if the head is meant'
                )
            names.remove("lm_head.weight")
        return {name: tuple(self._slice(name).get_shape()) for name in names}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """Read the wanted tensors, one after another."""
        return stream(self._rows, wanted, self.folder)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        part = self._slice(name)
        if part.get_dtype() not in _FLOATS:
            raise ValueError(
                f"tensor {name} in {self.folder} is {part.get_dtype()}: specjax reads {', '.join(_FLOATS)}"
            )
        rows: np.ndarray = part[start:stop]
        return rows

    def _slice(self, name: str):  # type: ignore[no-untyped-def]
        shard, stored = self._places[name]
        return self._files[shard].get_slice(stored)

    def _same(self, one: str, other: str) -> bool:
        if one not in self._places or other not in self._places:
            return False
        if self._slice(one).get_shape() != self._slice(other).get_shape():
            return False
        rows = self._slice(one).get_shape()[0]
        return all(
            self._rows(one, at, at + 4096).tobytes() == self._rows(other, at, at + 4096).tobytes()
            for at in range(0, rows, 4096)
        )


def _shards(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = tuple(folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values())))
    else:
        shards = (folder / "model.safetensors",)
    for shard in shards:
        if not shard.exists():
            raise DamagedFile(
                f"{shard} is missing: fetch the checkpoint again; if it has .bin or .pt files only, "
                "convert it with transformers' save_pretrained"
            )
    return shards


def _open(path: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise DamagedFile(f"{path} is truncated or damaged ({error}): fetch it again") from error


def _rename(name: str) -> str:
    return name.removeprefix("model.")
