"""The shapes of what a batch carries from round to round."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, sampling
from specjax.engine import MAX_END_IDS
from specjax.types import Counts, Params, Target


def state_shapes(
    program: decode.Program, params: Params, drafter_params: Params, *, batch: int, capacity: int, cache_dtype: Any
) -> decode.State:
    """The batch's `decode.State` as `jax.ShapeDtypeStruct`s: those that `decode.start` returns.

    Only what depends on the model or the drafter is traced; a whole prefill would take seconds.
    """
    model, taps = program.model, program.drafter.hidden_layers
    params, drafter_params = structs(params), structs(drafter_params)
    shape: Any = jax.ShapeDtypeStruct  # they stand for arrays
    integers = functools.partial(shape, dtype=jnp.int32)
    tokens, row = integers((batch, capacity)), integers((batch,))
    cache = jax.eval_shape(lambda: model.init_cache(batch, capacity, jnp.dtype(cache_dtype)))
    hidden: tuple[Any, ...] = ()
    if taps:
        run = functools.partial(model.forward, taps=taps)
        tapped = jax.eval_shape(run, params, integers((batch, 1)), cache, row).taps
        hidden = tuple(shape((batch, 1, capacity, tap.shape[-1]), tap.dtype) for tap in tapped)
    sampler = jax.eval_shape(lambda: sampling.make_sampling(batch))
    target = Target(model, params, cache, tokens, row, hidden, sampler)
    drafter = jax.eval_shape(program.drafter.init, drafter_params, target)
    flag, log = shape((batch,), jnp.bool), shape((batch, capacity), jnp.bool)
    counts = Counts(tokens, tokens, tokens, tokens, shape(tokens.shape, jnp.float32), log)
    keys = jax.eval_shape(lambda: sampling.row_keys(0, range(batch)))
    ends = integers((MAX_END_IDS,))
    return decode.State(tokens, row, row, flag, flag, keys, row, ends, sampler, cache, hidden, drafter, counts)


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
