"""Our own checkpoints: orbax for the arrays, JSON for the description, and the tokenizer's files beside them.

folder/model.json    what the model is
folder/weights/      arrays under their dotted names: a flat dict comes back with its keys as they were
folder/tokenizer*.json, generation_config.json
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array

from specjax.model import ModelConfig, RopeScaling
from specjax.text import Tokenizer, read_json
from specjax.types import Params
from specjax.weights.checkpoint import DamagedFile, Wanted, check_finite

_FORMAT = 1
_TOGETHER = 8  # arrays restored at once: orbax holds them twice for a moment


def save(path: str | Path, config: ModelConfig, params: Params, tokenizer: Tokenizer | None = None) -> None:
    """Write a checkpoint that `open_checkpoint(path)` reads.

    The description is written last: a folder with one is complete.

    Raises:
      FileExistsError: something stands at `path`.
      OSError: it can't be written.
    """
    folder = Path(path).expanduser().absolute()
    folder.mkdir(parents=True)
    leaves, _ = jax.tree.flatten_with_path(params)
    flat = {jax.tree_util.keystr(name, simple=True, separator="."): leaf for name, leaf in leaves}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "weights", flat)
    if tokenizer is not None:
        tokenizer.save(folder)
    description = {"format": _FORMAT, "model": dataclasses.asdict(config)}
    (folder / Native.DESCRIPTION).write_text(json.dumps(description, indent=1))


class Native:
    """Reader of a folder that `save` wrote."""

    DESCRIPTION = "model.json"

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        description = read_json(folder / self.DESCRIPTION)
        if description.get("format") != _FORMAT:
            found = description.get("format")
            raise ValueError(f"{folder / self.DESCRIPTION} has format {found!r}: this specjax reads format {_FORMAT}")
        try:
            fields = dict(description["model"])
            scaling = fields.pop("rope_scaling")
            scaling = None if scaling is None else RopeScaling(**scaling)
            self.config: ModelConfig = ModelConfig(**fields, rope_scaling=scaling)
        except (KeyError, TypeError) as error:
            raise DamagedFile(f"{folder / self.DESCRIPTION} describes no model ({error}): save it again") from error

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file of the folder."""
        return tuple(sorted(path for path in self.folder.rglob("*") if path.is_file()))

    def tokenizer(self) -> Tokenizer:
        """The one that was saved with the weights."""
        return Tokenizer.from_directory(self.folder)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The arrays of the checkpoint, from orbax's metadata."""
        with self._reading(), ocp.StandardCheckpointer() as checkpointer:
            metadata: Any = checkpointer.metadata(self.folder / "weights").item_metadata
            return {name: tuple(leaf.shape) for name, leaf in metadata.items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        """Restore the wanted arrays, a few at a time, cast by orbax."""
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        names = iter(wanted)
        while some := list(itertools.islice(names, _TOGETHER)):
            item = {n: jax.ShapeDtypeStruct(wanted[n].shape, wanted[n].dtype, sharding=place) for n in some}
            arguments = ocp.args.PyTreeRestore(
                item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
            )
            with self._reading(), ocp.PyTreeCheckpointer() as checkpointer:
                restored = checkpointer.restore(self.folder / "weights", args=arguments)
            for name in some:
                check_finite(name, restored[name], self.folder)
                yield name, restored[name]

    def _reading(self) -> _Reading:
        return _Reading(self.folder)


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
