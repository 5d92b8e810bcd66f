"""What a round of decoding holds in memory, from shapes alone: nothing is allocated, nothing is compiled.

Every component is found by tracing the functions that run (`jax.eval_shape`), so that a drafter of one's
own needs no code for its account. A strategy's bytes are compared with those of `none`, for the same
target, batch and capacity.

    bytes ▲                ┌──────────┐
          │   ┌────────┐   │ buffers  │   ┌────────┐   buffers live in one phase,
          │   │ buffers│   │          │   │        │   all else in every one: size
          │   ├────────┴───┴──────────┴───┴────────┤   for the highest column
          │   │ weights, KV, state                 │
          └───┴────────────────────────────────────┴─►
               draft        verify         commit
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.drafter import Nothing
from specjax.memory import buffers as working
from specjax.memory.buffers import PHASES
from specjax.memory.round_trace import Weights, state_shapes, structs, tracing

LARGEST_BATCH = 2**24
GROUPS = ("weights", "kv", "state", "buffers")


@dataclass(frozen=True)
class Component:
    """Bytes with a name. `group` is one of `GROUPS`; `phases` tells when they are held."""

    name: str
    group: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class Account:
    """A strategy's components, and those of `none` at the same batch and capacity."""

    components: tuple[Component, ...]
    baseline: tuple[Component, ...]

    def phase_bytes(self, phase: str, group: str | None = None) -> int:
        """What is held at once in a phase."""
        return _held(self.components, phase, group)

    @property
    def peak_bytes(self) -> int:
        """What is held at once when a draft is verified."""
        return self.phase_bytes("verify")

    @property
    def peak_phase(self) -> str:
        """The phase that holds most: usually verification, but a drafter's own buffers may be larger."""
        return max(PHASES, key=lambda phase: (self.phase_bytes(phase), phase == "verify"))

    @property
    def needed_bytes(self) -> int:
        """What a device must have: the bytes of `peak_phase`."""
        return self.phase_bytes(self.peak_phase)

    @property
    def added_bytes(self) -> dict[str, int]:
        """What the strategy needs beyond `none`, a group: in each, the phase that holds most counts."""
        return {
            group: max(_held(self.components, phase, group) for phase in PHASES)
            - max(_held(self.baseline, phase, group) for phase in PHASES)
            for group in GROUPS
        }

    def bytes(self, name: str) -> int:
        """One component's bytes; 0 where the strategy has none of that name."""
        return sum(component.bytes for component in self.components if component.name == name)


Size = Callable[[str, Any, Any], int]
"""Bytes of an array on one device, from its kind (`weights`, `kv`, `hidden`, `law`, ...), path and leaf."""


def nbytes(kind: str, path: Any, leaf: Any) -> int:
    """Bytes of the whole array: what one device holds when nothing is partitioned."""
    return int(np.prod(leaf.shape, dtype=np.int64)) * _itemsize(leaf.dtype)


def account(
    program: decode.Program,
    params: Weights,
    drafter_params: Weights,
    *,
    batch: int,
    capacity: int,
    cache_dtype: Any,
    size: Size = nbytes,
    backend: str | None = None,
) -> Account:
    """The account of one strategy.

    Args:
      params, drafter_params: arrays, or `jax.ShapeDtypeStruct`s of them. An array of the target that
        stands among the drafter's counts once, as the target's.
      batch: rows that are decoded together.
      capacity: cache slots a row: committed tokens and the speculative window.
      size: bytes of an array on one device, where arrays are partitioned.
      backend: `cpu`, `gpu` or `tpu`; this one's by default. A CPU keeps float32 copies of what it multiplies.
    """
    _check(program, batch, capacity)
    plain = decode.Program(program.model, Nothing(), program.rule)
    options: dict[str, Any] = {"batch": batch, "capacity": capacity, "cache_dtype": cache_dtype, "size": size}
    options["backend"] = backend or jax.default_backend()
    baseline = _components(plain, params, (), **options)
    if isinstance(program.drafter, Nothing):
        return Account(baseline, baseline)
    return Account(_components(program, params, drafter_params, **options), baseline)


def is_cache(node: Any) -> bool:
    """Whether a part of a drafter's state is a KV cache: a tuple of pairs of equal `[B, G, T, D]` arrays.

    That is the form of `specjax.types.Cache`, and of nothing else in practice: other state counts as state.
    """
    return (
        isinstance(node, (tuple, list))
        and len(node) > 0
        and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in node)
        and all(getattr(part, "ndim", 0) == 4 and part.shape == pair[0].shape for pair in node for part in pair)
    )


def _components(
    program: decode.Program,
    params: Weights,
    drafter_params: Weights,
    *,
    batch: int,
    capacity: int,
    cache_dtype: Any,
    size: Size,
    backend: str,
) -> tuple[Component, ...]:
    shared = {id(leaf) for leaf in jax.tree.leaves(params)}
    own = [(path, leaf) for path, leaf in _flat(drafter_params) if id(leaf) not in shared]
    leaves, tree = jax.tree.flatten((structs(params), structs(drafter_params)))
    state, round_ = _trace(program, tree, tuple(leaves), batch, capacity, jnp.dtype(cache_dtype), backend)
    nodes = round_.draft.tokens.shape[1]
    _check_draft(program, round_.draft, state, capacity)
    cache_bytes = _sum(size, "kv", _flat(state.cache))
    window_bytes = cache_bytes * nodes // capacity
    pieces = jax.tree.leaves(state.drafter, is_leaf=is_cache)
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    loop = {name: part for name, part in fields.items() if name not in ("cache", "hidden", "drafter")}
    held = (
        Component("target weights", "weights", _sum(size, "weights", _flat(params))),
        Component("drafter weights", "weights", _sum(size, "weights", own)),
        Component("target KV, committed", "kv", cache_bytes - window_bytes),
        Component("target KV, speculative window", "kv", window_bytes),
        Component("drafter KV", "kv", sum(_sum(size, "kv", _flat(piece)) for piece in pieces if is_cache(piece))),
        Component(
            "drafter state", "state", sum(_sum(size, "state", _flat(piece)) for piece in pieces if not is_cache(piece))
        ),
        Component("tapped hidden states", "state", _sum(size, "hidden", _flat(state.hidden))),
        Component("tokens and counts", "state", _sum(size, "state", _flat(loop))),
    )
    return held + tuple(
        Component(name, "buffers", 0 if leaf is None else count * size(kind, (), leaf), phases)
        for name, kind, leaf, count, phases in round_.buffers
    )


@functools.lru_cache(maxsize=64)
def _trace(
    program: decode.Program,
    tree: Any,
    leaves: tuple[Any, ...],
    batch: int,
    capacity: int,
    cache_dtype: Any,
    backend: str,
) -> tuple[Any, working.Round]:
    """The traced part, kept: strategies share their baseline, and devices and meshes share all of it."""
    params, drafter_params = jax.tree.unflatten(tree, leaves)
    with tracing(program):
        state = state_shapes(program, params, drafter_params, batch=batch, capacity=capacity, cache_dtype=cache_dtype)
        return state, working.trace(program, params, drafter_params, state, backend)


def _flat(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _sum(size: Size, kind: str, leaves: Iterable[tuple[Any, Any]]) -> int:
    return sum(size(kind, path, leaf) for path, leaf in leaves)


def _held(components: Iterable[Component], phase: str, group: str | None = None) -> int:
    return sum(part.bytes for part in components if phase in part.phases and group in (None, part.group))


def _itemsize(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return int(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).size) * 4
    return int(np.dtype(dtype).itemsize)


def _check_draft(program: decode.Program, draft: Any, state: Any, capacity: int) -> None:
    """What a traced draft must keep to, so that a round can follow a round."""
    name, nodes = type(program.drafter).__name__, draft.tokens.shape[1]
    if nodes >= capacity:
        raise ValueError(f"{name} drafts {nodes} tokens, which do not fit into {capacity} cache slots")
    before, after = ((jax.tree.structure(tree), _shapes(tree)) for tree in (state.drafter, draft.state))
    if before != after:
        raise ValueError(
            f"{name}: its state must keep its tree, shapes and dtypes; `init` returns {_shapes(state.drafter)}, "
            f"`propose` {_shapes(draft.state)}"
        )


def _shapes(tree: Any) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]


def _check(program: decode.Program, batch: int, capacity: int) -> None:
    context, window = program.model.context_length, program.drafter.num_speculative_tokens
    if not 1 <= batch <= LARGEST_BATCH:
        raise ValueError(f"batch={batch}: must be 1 to {LARGEST_BATCH}")
    if not 1 <= capacity <= context:
        raise ValueError(
            f"context of {capacity} tokens: must be 1 to {context}, the longest that the target was made for"
        )
    if window >= capacity:
        raise ValueError(f"num_speculative_tokens={window}: the window does not fit into {capacity} cache slots")
