"""Named arrays in a folder of ours: `model.safetensors`, or a folder `weights` of orbax's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

from specjax.types import Params
from specjax.weights.checkpoint import DamagedFile, Wanted, check_finite, first_line, flatten
from specjax.weights.safetensors_file import Tensors, read_header, write

FORMATS = ("safetensors", "orbax")
_SAFETENSORS, _ORBAX = "model.safetensors", "weights"
_TOGETHER = 8  # arrays restored at once: orbax holds them twice for a moment


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


def open_arrays(folder: Path) -> Tensors | OrbaxTensors:
    """What `write_arrays` wrote, whichever the format."""
    path = folder / _SAFETENSORS
    return Tensors(path, read_header(path)) if path.exists() else OrbaxTensors(folder.absolute())


class OrbaxTensors:
    """As `Tensors`."""

    def __init__(self, folder: Path):
        self.folder = folder

    def outline(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes, without reading an array."""
        import orbax.checkpoint as ocp

        with _reading(self.folder), ocp.StandardCheckpointer() as checkpointer:
            metadata: Any = checkpointer.metadata(self.folder / _ORBAX).item_metadata
            return {name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) for name, leaf in metadata.items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """A few at a time, cast by orbax; each is checked to be finite."""
        import orbax.checkpoint as ocp

        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        names = iter(wanted)
        while some := list(itertools.islice(names, _TOGETHER)):
            item = {n: jax.ShapeDtypeStruct(wanted[n].shape, wanted[n].dtype, sharding=place) for n in some}
            arguments = ocp.args.PyTreeRestore(
                item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
            )
            with _reading(self.folder), ocp.PyTreeCheckpointer() as checkpointer:
                restored = checkpointer.restore(self.folder / _ORBAX, args=arguments)
            for name in some:
                check_finite(name, restored[name], self.folder)
                yield name, restored[name]


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turns whatever orbax, tensorstore or json raise on a damaged folder into one error that says so."""
    try:
        yield
    except Exception as error:
        reason = first_line(error)[:200]
        raise DamagedFile(f"{folder} is no complete checkpoint ({reason}): copy it again, or save it again") from error
