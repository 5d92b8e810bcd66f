"""Our own checkpoints: the arrays, a description in JSON, and the tokenizer's files beside them.

folder/model.json                         what the model is
folder/weights/ or model.safetensors      arrays under their dotted names
folder/tokenizer*.json, generation_config.json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxtyping import Array

from specjax.model import ModelConfig, RopeScaling
from specjax.text import Tokenizer, read_json
from specjax.types import Params
from specjax.weights.arrays import open_arrays, write_arrays
from specjax.weights.checkpoint import Checkpoint, DamagedFile, Wanted

_FORMAT = 1


def save(
    path: str | Path, config: ModelConfig, params: Params, tokenizer: Tokenizer | None = None, *, format: str = "orbax"
) -> None:
    """Write a checkpoint that `open_checkpoint(path)` reads.

    The description is written last: a folder with one is complete.

    Args:
      format: of the arrays, `orbax` or `safetensors`.

    Raises:
      FileExistsError: something stands at `path`.
      OSError: it can't be written.
    """
    folder = Path(path).expanduser().absolute()
    folder.mkdir(parents=True)
    write_arrays(folder, params, format)
    if tokenizer is not None:
        tokenizer.save(folder)
    description = {"format": _FORMAT, "model": dataclasses.asdict(config)}
    (folder / Native.DESCRIPTION).write_text(json.dumps(description, indent=1))


class Native(Checkpoint):
    """A folder that `save` wrote."""

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
            if scaling is not None:
                scaling = RopeScaling(**scaling | {"divisors": tuple(scaling.get("divisors", ()))})
            self.config = ModelConfig(**fields, rope_scaling=scaling)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedFile(f"{folder / self.DESCRIPTION} describes no model ({error}): save it again") from error

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(path for path in self.folder.rglob("*") if path.is_file()))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(self.folder)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: leaf.shape for name, leaf in open_arrays(self.folder).outline().items()}

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Array]]:
        return open_arrays(self.folder).tensors(wanted)
