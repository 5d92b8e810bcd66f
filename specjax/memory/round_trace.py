"""A round of decoding, traced from shapes: what a batch carries, what is drafted, and the operations of both halves.

The one place where the accountant calls `specjax.decode`. Traces are kept: an account and the traffic of the same
round share one, strategies share their baseline, and devices and meshes share all of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, sampling
from specjax.engine import MAX_END_IDS
from specjax.state import DraftError
from specjax.types import Draft, Prompts

Weights = Any
"""A tree of arrays, or of the `jax.ShapeDtypeStruct`s that stand for them."""


@dataclass(frozen=True)
class Round:
    """A program with its arrays as shapes, and the jaxprs of its halves."""

    program: decode.Program
    params: Weights
    drafter_params: Weights
    state: Any  # a `decode.State`
    draft: Draft
    drafting: Any  # the jaxpr of `propose(params, drafter_params, state)`
    verifying: Any  # of `verify_and_commit(params, drafter_params, state, draft)`

    @property
    def vocabulary_sizes(self) -> frozenset[int]:
        """Sizes of the vocabulary's side of a matrix: real ids, and rows where a checkpoint pads them."""
        model = self.program.model
        size = model.vocab_size
        return frozenset({size, getattr(getattr(model, "config", None), "padded_vocab_size", size)})


def state_shapes(
    program: decode.Program, params: Weights, drafter_params: Weights, *, batch: int, capacity: int, cache_dtype: Any
) -> Any:
    """The batch's `decode.State` as `jax.ShapeDtypeStruct`s: those of its own builder."""

    def build(params: Any, drafter_params: Any) -> decode.State:
        prompts = Prompts(
            tokens=jnp.zeros((batch, capacity), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
            limit=jnp.zeros((batch,), jnp.int32),
            keys=sampling.row_keys(0, range(batch)),
            end_ids=jnp.zeros((MAX_END_IDS,), jnp.int32),
            sampling=sampling.make_sampling(batch),
        )
        return decode.init_state(program, params, drafter_params, prompts, cache_dtype)

    with _naming(program):
        return jax.eval_shape(build, structs(params), structs(drafter_params))


def trace_round(
    program: decode.Program, params: Weights, drafter_params: Weights, *, batch: int, capacity: int, cache_dtype: Any
) -> Round:
    """Trace both halves of a round.

    Raises:
      DraftError: a draft or a state of another form, so that no round can follow.
      RuntimeError: whatever the drafter's code raises, with its name.
    """
    leaves, tree = jax.tree.flatten((structs(params), structs(drafter_params)))
    return _trace(program, tree, tuple(leaves), batch, capacity, jnp.dtype(cache_dtype))


@functools.lru_cache(maxsize=128)
def _trace(
    program: decode.Program, tree: Any, leaves: tuple[Any, ...], batch: int, capacity: int, cache_dtype: Any
) -> Round:
    params, own = jax.tree.unflatten(tree, leaves)
    state = state_shapes(program, params, own, batch=batch, capacity=capacity, cache_dtype=cache_dtype)
    with _naming(program):
        propose = functools.partial(decode.propose, program)
        drafting, draft = jax.make_jaxpr(propose, return_shape=True)(params, own, state)
        verifying = jax.make_jaxpr(functools.partial(decode.verify_and_commit, program))(params, own, state, draft)
    return Round(program, params, own, state, draft, drafting.jaxpr, verifying.jaxpr)


def draft_shapes(
    program: decode.Program, params: Weights, drafter_params: Weights, *, batch: int, capacity: int, cache_dtype: Any
) -> Draft:
    """The draft of a round as shapes, without tracing its other half."""
    state = state_shapes(program, params, drafter_params, batch=batch, capacity=capacity, cache_dtype=cache_dtype)
    with _naming(program):
        draft: Draft = jax.eval_shape(functools.partial(decode.propose, program), params, drafter_params, state)
    return draft


def structs(tree: Any) -> Any:
    """The shapes of a tree of arrays (or of shapes); a sharding is kept."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            if not isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        tree,
    )


@contextlib.contextmanager
def _naming(program: decode.Program) -> Iterator[None]:
    """While a drafter's code is traced, whatever it raises is an answer that names it."""
    try:
        yield
    except DraftError:
        raise
    except Exception as error:
        name = type(program.drafter).__name__
        raise RuntimeError(f"drafter {name} can't be traced: {type(error).__name__}: {error}") from error
