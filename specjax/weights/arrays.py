"""Named arrays in a folder of ours: `model.safetensors`, or a folder `weights` of orbax's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array

from specjax.types import Params
from specjax.weights.checkpoint import DamagedFile, Wanted, check_finite, flatten, stream
from specjax.weights.safetensors_file import DTYPES, read_header, read_rows, write

FORMATS = ("safetensors", "orbax")
_SAFETENSORS, _ORBAX = "model.safetensors", "weights"
_TOGETHER = 8  # arrays restored at once: orbax holds them twice for a moment


class Arrays(Protocol):
    """Arrays that lie in a folder."""

    def outline(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What there is, without reading it."""

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """The wanted ones in the wanted dtypes; each is checked to be finite."""


def write_arrays(folder: Path, tree: Params, format: str) -> None:
    """Write a tree of arrays into a folder that has none.

    Raises:
      ValueError: an unknown format.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {', '.join(FORMATS)}")
    if format == "safetensors":
        write(folder / _SAFETENSORS, flatten(tree))
        return
    import orbax.checkpoint as ocp  # a third of a second, which most readers of weights need not wait

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / _ORBAX, flatten(tree))


def open_arrays(folder: Path) -> Arrays:
    """What `write_arrays` wrote, whichever the format."""
    return _Safetensors(folder / _SAFETENSORS) if (folder / _SAFETENSORS).exists() else _Orbax(folder.absolute())


class _Safetensors:
    def __init__(self, path: Path):
        self.path = path
        self.entries = read_header(path)

    def outline(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(e.shape, DTYPES[e.dtype]) for name, e in self.entries.items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        return stream(self._rows, wanted, self.path)

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return read_rows(self.entries[name], start, stop)


class _Orbax:
    def __init__(self, folder: Path):
        self.folder = folder

    def outline(self) -> dict[str, jax.ShapeDtypeStruct]:
        import orbax.checkpoint as ocp

        with _Reading(self.folder), ocp.StandardCheckpointer() as checkpointer:
            metadata: Any = checkpointer.metadata(self.folder / _ORBAX).item_metadata
            return {name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for name, leaf in metadata.items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """A few at a time, cast by orbax."""
        import orbax.checkpoint as ocp

        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        names = iter(wanted)
        while some := list(itertools.islice(names, _TOGETHER)):
            item = {n: jax.ShapeDtypeStruct(wanted[n].shape, wanted[n].dtype, sharding=place) for n in some}
            arguments = ocp.args.PyTreeRestore(
                item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
            )
            with _Reading(self.folder), ocp.PyTreeCheckpointer() as checkpointer:
                restored = checkpointer.restore(self.folder / _ORBAX, args=arguments)
            for name in some:
                check_finite(name, restored[name], self.folder)
                yield name, restored[name]


class _Reading:
    """Turns whatever orbax, tensorstore or json raise on a damaged folder into one error that says so."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DamagedFile(
                f"{self.folder} is no complete checkpoint ({first[:200]}): copy it again, or save it again"
            ) from error
