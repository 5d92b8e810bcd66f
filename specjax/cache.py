"""The KV cache: `(keys, values)` per layer and, outside of it, one length a row.

    slot     0   1   2   3   4   5   6   7   8 ...
             a   b   c   d   e   .   .   .   .        length 5: a..e are committed, e is pending
             |--- real --|   |------ scratch -----
    round    a   b   c   d   e  x1  x2  x3            the window [e, x1, x2, x3] is written at slot 4
    accept   a   b   c   d   e  x1   y   .            x1 kept, y drawn: length 7, y is pending

Slots at and beyond `length - 1` are scratch. A rollback is keeping the length: nothing is copied,
cropped or zeroed, and attention masks what is stale. Heads stand before slots and layers are separate
arrays, so that the compiled loop updates each in place (tests/test_compiled.py asks the compiler).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from specjax.types import Cache

LANES = {"tpu": 128}
"""A platform's arrays are padded to a multiple of this width. A TPU's compiler stores a cache of heads of 64 without
padding, but computes on it padded, and holds both: a cache that is padded from the start is held once."""


def padded(width: int, lanes: int) -> int:
    """The next multiple of `lanes`."""
    return -(-width // lanes) * lanes


def init_cache(layers: int, batch: int, heads: int, capacity: int, width: int, dtype: Any) -> Cache:
    """Zeros: an uninitialised NaN would leak through a masked product."""
    shape = (batch, heads, capacity, width)
    return Cache(tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers)))


def write(
    slots: Float[Array, "B G T W"], rows: Float[Array, "B G S W"], start: Int[Array, "B"]
) -> Float[Array, "B G T W"]:
    """Write `rows` at slots `start .. start + S - 1` of each row; what lies outside of the cache is dropped.

    `dynamic_update_slice` would clamp instead, and overwrite committed slots at the end of the cache.
    """
    batch, heads, capacity, _ = slots.shape
    index = start[:, None] + jnp.arange(rows.shape[2], dtype=start.dtype)[None]
    index = jnp.where(index < 0, capacity, index)  # a negative index would wrap
    row = jnp.arange(batch, dtype=start.dtype)[:, None, None]
    head = jnp.arange(heads, dtype=start.dtype)[None, :, None]
    return slots.at[row, head, index[:, None]].set(rows.astype(slots.dtype), mode="drop", unique_indices=True)


def commit_path(cache: Cache, start: Int[Array, "B"], path: Int[Array, "B K"]) -> Cache:
    """Move the accepted nodes of a tree to the slots behind the pending token, inside the window only.

    Node i of the draft stands at slot `start + 1 + i`, and belongs at `start + 1 + depth`. Slots of
    `path` entries -1 receive scratch. A chain is in place already: don't call this for it.
    """
    source = start[:, None] + 1 + jnp.maximum(path, 0)

    def move(slots: Float[Array, "B G T W"]) -> Float[Array, "B G T W"]:
        index = jnp.minimum(source, slots.shape[2] - 1)[:, None, :, None]
        return write(slots, jnp.take_along_axis(slots, index, axis=2), start + 1)

    return jax.tree.map(move, cache)


def scratch(tree: PyTree[Array], first: Int[Array, "B"]) -> PyTree[Bool[Array, "..."]]:
    """What may hold anything in a tree that has caches in it: of each, the slots from `first` on; nothing else."""

    def mark(node: Any) -> Any:
        if not isinstance(node, Cache):
            return jnp.zeros(jnp.shape(node), bool)
        stale = jnp.arange(node.capacity, dtype=first.dtype)[None] >= first[:, None]
        return jax.tree.map(lambda slots: jnp.broadcast_to(stale[:, None, :, None], slots.shape), node)

    return jax.tree.map(mark, tree, is_leaf=lambda node: isinstance(node, Cache))
