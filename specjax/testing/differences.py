"""What two runs of a drafter differ in: the first place, named with the rule that it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from specjax.drafter import Drafter
from specjax.types import Draft

GARBAGE = 1e4


class ContractError(AssertionError):
    """A drafter that breaks a rule; the message names the rule, and where."""


def keeps(drafter: Drafter, method: str, before: PyTree[Array], after: PyTree[Array]) -> None:
    """A state that a round can follow: the same tree, shapes and dtypes, nothing weakly typed."""
    if str(jax.tree.structure(before)) != str(jax.tree.structure(after)):
        where = f"{jax.tree.structure(before)} became {jax.tree.structure(after)}"
        broken(drafter, f"keeps the tree of its state in `{method}`", where)
    for path, old, new in pairs(before, after):
        if (old.shape, old.dtype) != (new.shape, new.dtype) or new.weak_type:
            where = f"{path or 'it'} was {old.dtype}{list(old.shape)}, is {new.dtype}{list(new.shape)}"
            where += " of a weak type" * new.weak_type
            broken(drafter, f"keeps shapes, dtypes and weak types in `{method}`", where)


def fill_garbage(tree: PyTree[Array], where: PyTree[Array]) -> PyTree[Array]:
    """Garbage where a tree of masks says so."""

    def fill(leaf: Array, bad: Array) -> Array:
        return jnp.where(bad, jnp.asarray(GARBAGE if jnp.issubdtype(leaf.dtype, jnp.floating) else 7, leaf.dtype), leaf)

    return jax.tree.map(fill, tree, where)


def copy(tree: PyTree[Array]) -> PyTree[Array]:
    """The same values in other buffers: these may be donated."""
    return jax.tree.map(jnp.copy, tree)


def real_nodes(draft: Draft) -> Array:
    """Which nodes count, [B, N]."""
    nodes = draft.tokens.shape[1]
    count = jnp.full(draft.tokens.shape[:1], nodes, jnp.int32) if draft.count is None else draft.count
    return jnp.arange(nodes, dtype=jnp.int32)[None] < count[:, None]


def pairs(*trees: PyTree[Array]) -> Iterator[tuple[Any, ...]]:
    """Leaves of equal trees, with the path to each."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(trees[0])[0]]
    return zip(paths, *(jax.tree.leaves(tree) for tree in trees), strict=True)


def same_draft(drafter: Drafter, rule: str, one: Draft, other: Draft) -> None:
    """Equal counts, and equal real tokens with equal probabilities."""
    real = np.asarray(real_nodes(one))
    compare(drafter, rule, "count", real.sum(-1), np.asarray(real_nodes(other)).sum(-1))
    compare(drafter, rule, "tokens", np.where(real, one.tokens, 0), np.where(real, other.tokens, 0))
    if one.log_q is not None and other.log_q is not None:
        expected, found = (np.exp(np.where(real[..., None], np.asarray(q), 0)) for q in (one.log_q, other.log_q))
        compare(drafter, rule, "log_q", expected, found, rtol=1e-5, atol=1e-6)


def same_state(drafter: Drafter, rule: str, one: PyTree[Array], other: PyTree[Array], length: Int[Array, "B"]) -> None:
    """Equal states, but for what is scratch at these lengths."""
    for path, expected, found, free in pairs(one, other, drafter.scratch(one, length)):
        expected, found = (np.where(free, 0, part) for part in (expected, found))
        compare(drafter, rule, path, expected, found, rtol=1e-3, atol=1e-3)


def compare(
    drafter: Drafter, rule: str, what: str, expected: Any, found: Any, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Equal arrays, or the first place where they are not."""
    expected, found = (np.asarray(part, np.float64) for part in (expected, found))
    differ = ~np.isclose(expected, found, rtol=rtol, atol=atol, equal_nan=True)
    for place in np.argwhere(differ)[:1]:
        index = tuple(place.tolist())
        where = f"{what}[{', '.join(map(str, index))}] was {expected[index]}, is {found[index]}"
        broken(
            drafter, rule, f"{where} ({int(differ.sum())} of {differ.size} entries differ; the first index is the row)"
        )


def expect(drafter: Drafter, name: str, array: Array, shape: tuple[int, ...], dtype: Any) -> None:
    """An array of this shape and dtype."""
    if array.shape != shape or array.dtype != dtype:
        wanted = f"{jnp.dtype(dtype).name}{list(shape)}"
        broken(drafter, f"returns {name} as {wanted}", f"it is {array.dtype}{list(array.shape)}")


def broken(drafter: Drafter, rule: str, where: str) -> NoReturn:
    """Name the rule and where it is broken."""
    raise ContractError(f"{type(drafter).__name__} breaks a rule of drafters: it {rule}. {where}")
