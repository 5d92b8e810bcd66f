"""A tiny preset for the accountant, and tiny programs as shapes."""

import jax
import jax.numpy as jnp
import pytest

from specjax import decode
from specjax.memory.jaxpr_traffic import traffic
from specjax.memory.round_trace import trace_round
from specjax.mesh import Layout
from specjax.model import PRESETS, Llama
from specjax.plugins import load_drafter
from specjax.testing import tiny_config

SIZES = {"num_layers": 3, "context_length": 512, "tied_embeddings": False}


@pytest.fixture(scope="module", autouse=True)
def preset():
    """`tiny` is a target like any other."""
    PRESETS["tiny"] = tiny_config(**SIZES)
    yield PRESETS["tiny"]
    del PRESETS["tiny"]


def measured_traffic(drafter, batch=2, capacity=64, layout=None, backend="tpu", dtype=jnp.bfloat16, **changes):
    """What a tiny program's round moves, with its weights."""
    model = Llama(tiny_config(**(SIZES | changes)))
    drafter = load_drafter(drafter) if isinstance(drafter, str) else drafter
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model.shapes())
    own = jax.eval_shape(lambda key, weights: drafter.params(key, model, weights), jax.random.key(0), params)
    traced = trace_round(decode.Program(model, drafter), params, own, batch=batch, capacity=capacity, cache_dtype=dtype)
    return traffic(traced, layout or Layout(), backend), params, own


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
