"""A checkpoint as the rest of specjax sees it, whatever file it comes from: description, tokenizer, weights.

Weights are checked against the model that the description promises before the first one is read, and
then streamed: one tensor at a time, in blocks of rows, straight into the wanted dtype. Beside the loaded
weights, host memory holds one tensor and one block.
"""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.model import Llama, ModelConfig
from specjax.model.decoder import FP8
from specjax.text import Tokenizer
from specjax.types import Params
from specjax.weights.progress import progress_bar

_BLOCK_BYTES = 4 << 20  # of float32: small beside a tensor, large beside the cost of a call

Wanted = Mapping[str, jax.ShapeDtypeStruct]
Rows = Callable[[str, int, int], np.ndarray]


class DamagedFile(ValueError):
    """A file is truncated or corrupt, so that fetching it again may help."""


class Checkpoint(abc.ABC):
    """A model on disk; each format is a subclass. Opening one reads its description only; `load` reads the weights.

    Names of tensors are a Hugging Face checkpoint's, without the leading `model.`.
    """

    config: ModelConfig
    name = ""
    progress = True

    @property
    @abc.abstractmethod
    def files(self) -> tuple[Path, ...]:
        """All that decides what the model does: weights, description, tokenizer."""

    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer.

        Raises:
          ValueError: the checkpoint has none, or a kind that specjax does not read.
        """

    @abc.abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors that the checkpoint holds."""

    @abc.abstractmethod
    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """The wanted tensors in their dtypes; each is checked to be finite."""

    @property
    def model(self) -> Llama:
        """The decoder, with a cache as this backend stores it."""
        return Llama.on(jax.default_backend(), self.config)

    @functools.cached_property
    def sha256(self) -> str:
        """Of the files' names and contents: what a run's manifest keeps."""
        digest = hashlib.sha256()
        total = sum(path.stat().st_size for path in self.files)
        with progress_bar(f"Hashing {self.name}", total, self.progress and total > 1 << 30) as advance:
            for path in sorted(self.files):
                digest.update(path.name.encode() + b"\0")
                digest.update(bytes.fromhex(sha256_of(path, advance)))
        return digest.hexdigest()

    def load(self, dtype: Any = None) -> Params:
        """Read the weights as the nested dict that `Llama(config)` takes.

        Args:
          dtype: of all weights that are not quantised; `default_dtype()` if not given.

        Raises:
          ValueError: a tensor is missing, left over, of another shape, or not finite; or a file is damaged.
        """
        dtype = jnp.dtype(default_dtype() if dtype is None else dtype)
        shapes = outline(self.config, dtype)
        wanted = flatten(shapes)
        fix = f"{self.files[0]} does not fit its own description: fetch it again, or correct the description"
        check_fit(wanted, self.shapes(), "model", fix)
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in wanted.values())
        loaded = {}
        with progress_bar(f"Loading {self.name}", total, self.progress and total > 1 << 28) as advance:
            for name, tensor in self.tensors(wanted):
                loaded[name] = tensor
                advance(tensor.nbytes)
        return jax.tree.unflatten(jax.tree.structure(shapes), [loaded[name] for name in wanted])


def outline(config: ModelConfig, dtype: Any) -> Params:
    """Shapes of a decoder's weights in `dtype`, but for those that are quantised."""
    wide = jnp.dtype(dtype)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if leaf.dtype == FP8 else wide),
        Llama(config).shapes(),
    )


def flatten(tree: Params) -> dict[str, Any]:
    """Leaves by their dotted path: a flat dict comes back with its keys as they were."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def default_dtype() -> Any:
    """bfloat16 where the hardware multiplies it; float32 on CPU, where XLA would widen it first."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def check_fit(wanted: Wanted, found: Mapping[str, tuple[int, ...]], what: str, fix: str) -> None:
    """Compare the tensors that a model or a drafter needs with those that there are.

    Raises:
      ValueError: naming the first tensor that is missing, of another shape, or left over.
    """
    for name, leaf in wanted.items():
        if name not in found:
            raise ValueError(f"tensor {name} is missing ({len(found)} of {len(wanted)} are there); {fix}")
        if found[name] != leaf.shape:
            raise ValueError(f"tensor {name} has shape {found[name]}, the {what} needs {leaf.shape}; {fix}")
    for name in found:
        if name not in wanted:
            raise ValueError(f"tensor {name} {found[name]} is no part of the {what}; {fix}")


def stream(rows: Rows, wanted: Wanted, origin: Path) -> Iterator[tuple[str, Array]]:
    """Yield each wanted tensor, read through `rows(name, start, stop)` in blocks."""
    for name, leaf in wanted.items():
        tensor = np.empty(leaf.shape or (1,), leaf.dtype)  # a scalar is a row
        count = tensor.shape[0]
        width = max(1, leaf.size // max(1, count))
        block = max(1, _BLOCK_BYTES // (4 * width))
        for start in range(0, count, block):
            part = rows(name, start, min(start + block, count))
            check_finite(name, part, origin)
            with np.errstate(over="ignore"):
                tensor[start : start + block] = part
            if not np.isfinite(tensor[start : start + block]).all():
                raise ValueError(f"tensor {name} in {origin} has values beyond {leaf.dtype}: use --dtype float32")
        yield name, jnp.asarray(tensor.reshape(leaf.shape))


def check_finite(name: str, values: Any, origin: Path) -> None:
    """Raise `DamagedFile`, naming the tensor, if it holds a NaN or an infinity."""
    if not bool(np.isfinite(np.asarray(values)).all()):
        raise DamagedFile(
            f"tensor {name} in {origin} holds NaN or Inf: the file is damaged or was saved from a failed run"
        )


def first_line(error: Exception) -> str:
    """What other people's errors say, as a part of one of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sha256_of(path: Path, advance: Callable[[int], None] = lambda done: None) -> str:
    """SHA-256 of one file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
