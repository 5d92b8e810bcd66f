"""How a round is laid out over a mesh of devices: which axis splits which array, to run it or to count its bytes.

A mesh has three axes: `data` splits rows; `heads` and `group` together split a model. Key/value heads are
split over `heads` alone, the largest part of the mesh that divides them; over `group` they are repeated,
and only query heads, features and the vocabulary are split. A dimension that its axes do not divide is
not split at all: every device holds the whole of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.types import Cache

MODEL = ("heads", "group")

_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "q_proj": (MODEL, None),
    "k_proj": ("heads", None),
    "v_proj": ("heads", None),
    "o_proj": (None, MODEL),
    "gate_proj": (MODEL, None),
    "up_proj": (MODEL, None),
    "down_proj": (None, MODEL),
    "embed_tokens": (MODEL, None),
    "lm_head": (MODEL, None),
}
"""Axes of each `[out, in]` matrix, by the module's name; what is not named is repeated on every device."""

_ARRAYS: dict[str, tuple[Any, ...]] = {
    "kv": ("data", "heads", None, None),
    "scores": ("data", "heads", "group"),
    "probs": ("data", None, MODEL),
    "mask": ("data",),
    "hidden": ("data",),
    "state": ("data",),
    "features": (MODEL, "data", None),
    "activations": ("data",),
    "dequantised": (MODEL, None),
}
"""Axes of every other array, by its kind: what it is for in a round."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes."""

    data: int = 1
    heads: int = 1
    group: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.heads * self.group

    def spec(self, kind: str, path: Any, leaf: Any) -> PartitionSpec:
        """The axes that split an array; an axis that does not divide its dimension is left out."""
        axes = _weight_axes(path, leaf.ndim) if kind == "weights" else _ARRAYS.get(kind, ())
        if kind == "state" and "end_ids" in jax.tree_util.keystr(path):
            axes = ()  # shared by all rows
        axes = (*axes, *(None,) * leaf.ndim)[: leaf.ndim]
        return PartitionSpec(
            *(axis if size % self.parts(axis) == 0 else None for axis, size in zip(axes, leaf.shape, strict=True))
        )

    def parts(self, axis: Any) -> int:
        """Into how many parts an axis, a group of axes or `None` splits a dimension."""
        names = (axis,) if isinstance(axis, str) else axis or ()
        return math.prod(getattr(self, name) for name in names)

    def splits(self, intermediate_size: int) -> bool:
        """Whether the devices that share a model divide its features, which are most of its weights."""
        return intermediate_size % self.parts(MODEL) == 0

    def size(self, kind: str, path: Any, leaf: Any) -> int:
        """Bytes of an array on one device."""
        return nbytes(leaf) // math.prod(self.parts(axis) for axis in self.spec(kind, path, leaf))

    def total(self, kind: str, tree: Any) -> int:
        """Bytes of a tree's arrays on one device."""
        return sum(self.size(kind, path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0])

    def mesh(self, devices: Any) -> Mesh:
        """The mesh over real devices, or over a topology's."""
        grid = np.asarray(devices, dtype=object)[: self.devices].reshape(self.data, self.heads, self.group)
        return Mesh(grid, ("data", "heads", "group"), axis_types=(jax.sharding.AxisType.Auto,) * 3)

    def shardings(self, mesh: Mesh, kind: str, tree: Any) -> Any:
        """Where each array of a tree lies, as `jax.device_put` takes it."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(mesh, self.spec(kind, path, leaf)), tree
        )

    def state_shardings(self, mesh: Mesh, state: Any) -> Any:
        """The same for all that a batch carries: caches by heads, all else by rows."""
        pieces, tree = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda node: isinstance(node, Cache))
        return jax.tree.unflatten(
            tree,
            [
                self.shardings(mesh, "kv", piece)
                if isinstance(piece, Cache)
                else NamedSharding(mesh, self.spec("state", path, piece))
                for path, piece in pieces
            ],
        )


def split(devices: int, kv_heads: int, *, data: int = 1) -> Layout:
    """Split `devices` into `data` copies of the model, each over the rest.

    Raises:
      ValueError: a number of devices that `data` does not divide.
    """
    if data < 1 or devices % data:
        raise ValueError(f"data={data}: must divide the mesh of {devices} devices")
    model = devices // data
    heads = math.gcd(model, kv_heads)
    return Layout(data, heads, model // heads)


def nbytes(leaf: Any) -> int:
    """Bytes of a whole array, keys of random numbers included."""
    dtype = leaf.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        itemsize = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size * 4
    else:
        itemsize = np.dtype(dtype).itemsize
    return int(np.prod(leaf.shape, dtype=np.int64)) * int(itemsize)


def _weight_axes(path: Any, ndim: int) -> tuple[Any, ...]:
    names = [str(getattr(key, "key", key)) for key in path]
    axes = next((_WEIGHTS[name] for name in names if name in _WEIGHTS), ())
    return axes if ndim == 2 else axes[:ndim]  # a scale or a bias goes with the output channels
