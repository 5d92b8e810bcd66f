"""The shapes of what a batch carries from round to round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, sampling
from specjax.engine import MAX_END_IDS
from specjax.types import Counts, Model, Target

Weights = Any
"""A tree of arrays, or of the `jax.ShapeDtypeStruct`s that stand for them."""


def state_shapes(
    program: decode.Program, params: Weights, drafter_params: Weights, *, batch: int, capacity: int, cache_dtype: Any
) -> Any:
    """The batch's `decode.State` as `jax.ShapeDtypeStruct`s: those that `decode.start` returns.

    Only what depends on the model or the drafter is traced; a whole prefill would take seconds.
    """

    def build(params: Any, drafter_params: Any) -> decode.State:
        model, taps = program.model, program.drafter.hidden_layers
        tokens, row = jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32)
        flag, sampler = row > 0, sampling.make_sampling(batch)
        cache = model.init_cache(batch, capacity, jnp.dtype(cache_dtype))
        hidden: tuple[Any, ...] = ()
        if taps:
            tapped = model.forward(params, tokens[:, :1], cache, row, taps=taps).taps
            hidden = tuple(jnp.zeros((batch, 1, capacity, tap.shape[-1]), tap.dtype) for tap in tapped)
        drafter = program.drafter.init(drafter_params, Target(model, params, cache, tokens, row, hidden, sampler))
        counts = Counts(tokens, tokens, tokens, tokens, tokens.astype(jnp.float32), tokens > 0)
        keys, ends = sampling.row_keys(0, range(batch)), jnp.zeros((MAX_END_IDS,), jnp.int32)
        return decode.State(tokens, row, row, flag, flag, keys, row, ends, sampler, cache, hidden, drafter, counts)

    return jax.eval_shape(build, structs(params), structs(drafter_params))


@contextlib.contextmanager
def tracing(program: decode.Program) -> Iterator[None]:
    """While a drafter's code is traced, whatever it raises is an answer that names it.

    Raises:
      RuntimeError: in place of any exception.
    """
    try:
        yield
    except Exception as error:
        name = type(program.drafter).__name__
        raise RuntimeError(f"drafter {name} can't be traced: {type(error).__name__}: {error}") from error


def vocabulary_sizes(model: Model) -> frozenset[int]:
    """Sizes of the vocabulary's side of a matrix: real ids, and rows where a checkpoint pads them."""
    size = model.vocab_size
    return frozenset({size, getattr(getattr(model, "config", None), "padded_vocab_size", size)})


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
