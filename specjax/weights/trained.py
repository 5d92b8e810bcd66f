"""A trained drafter on disk: a card that says what it is, and its weights.

folder/drafter.json                       class, fields, the target that it was trained for, provenance
folder/model.safetensors or weights/      its weights, under their dotted names
folder/eagle.py                           the source of its class, where that is not one of specjax's own

`specjax.load_drafter("./folder")` opens it. The card is written last: a folder with one is complete.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.model import ModelConfig
from specjax.text import Tokenizer
from specjax.types import Params
from specjax.weights import native
from specjax.weights.arrays import open_arrays, write_arrays
from specjax.weights.card import CARD, FORMAT, TargetIdentity, name_of, read_card
from specjax.weights.checkpoint import check_fit, flatten, sha256_of


class HasCheckpoint(Protocol):
    """A drafter, as far as its weights go: a frozen dataclass."""

    @property
    def checkpoint(self) -> str:
        """The folder of its trained weights."""


def save_drafter(
    path: str | Path,
    drafter: HasCheckpoint,
    params: Params,
    *,
    target: TargetIdentity,
    provenance: Mapping[str, Any],
    format: str = "safetensors",
    config: ModelConfig | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a trained drafter that `specjax.load_drafter(path)` opens.

    Args:
      target: of the model that it was trained for: `LanguageModel.fingerprint`.
      provenance: where the weights come from: data, steps, versions; anything that JSON can hold.
      format: `safetensors` or `orbax`.
      config, tokenizer: of a drafter that is a whole model, as `external` is: the folder is then a model's, too.

    Raises:
      FileExistsError: something stands at `path`.
      ValueError: no weights, or a class or field that can't be written down.
    """
    if not jax.tree.leaves(params):
        raise ValueError(f"{drafter!r} has no weights of its own: there is nothing to save")
    kind, source = name_of(type(drafter))
    fields = _fields_of(drafter)
    folder = Path(path).expanduser().absolute()
    if config is not None:
        native.save(folder, config, params, tokenizer, format=format)
    else:
        folder.mkdir(parents=True)
        write_arrays(folder, params, format)
    if source is not None:
        shutil.copyfile(source, folder / source.name)
    files = {str(file.relative_to(folder)): sha256_of(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    card = {
        "format": FORMAT, "class": kind, "fields": fields, "target": dataclasses.asdict(target),
        "files": files, "provenance": dict(provenance),
    }  # fmt: skip
    (folder / CARD).write_text(json.dumps(card, indent=1))


def load_drafter_params(drafter: HasCheckpoint, like: Params) -> Params:
    """The weights in a drafter's `checkpoint`, as the tree and in the dtypes of `like`.

    Floating-point weights are cast; what is quantised or whole numbers must be stored as it is wanted.

    Args:
      like: arrays or their shapes, as `init_params` gives them.

    Raises:
      ValueError: a tensor that is missing, left over, of another shape or kind, or not finite.
      DamagedFile: a file that is not the one that was saved.
    """
    card = read_card(drafter.checkpoint)
    card.check_kind(type(drafter))
    card.check_files()
    wanted = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in flatten(like).items()}
    arrays = open_arrays(card.folder)
    found = arrays.outline()
    fix = f"the fields, the source or the target of {card.folder} are not those of the training"
    check_fit(wanted, {name: leaf.shape for name, leaf in found.items()}, "drafter", fix)
    for name, leaf in wanted.items():
        if found[name].dtype != leaf.dtype and not (_wide(found[name].dtype) and _wide(leaf.dtype)):
            raise ValueError(f"tensor {name} is {found[name].dtype}, the drafter needs {leaf.dtype}; {fix}")
    loaded = dict(arrays.tensors(wanted))
    return jax.tree.unflatten(jax.tree.structure(like), [loaded[name] for name in wanted])


def hash_params(params: Params) -> str:
    """SHA-256 of weights in memory, with their names, shapes and dtypes."""
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten(params).items()):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


def _wide(dtype: Any) -> bool:
    """Floating-point numbers that mean the same in another width."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize >= 2


def _fields_of(drafter: Any) -> dict[str, Any]:
    fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter) if field.init}
    if "checkpoint" not in fields:
        raise ValueError(f'{type(drafter).__name__} has no field for its folder: declare `checkpoint: str = ""` in it')
    del fields["checkpoint"]
    for name, value in fields.items():
        if not isinstance(value, bool | int | float | str | tuple | None):
            raise ValueError(f"{name}={value!r} can't be written to a card: save the drafter that is inside")
    return fields
