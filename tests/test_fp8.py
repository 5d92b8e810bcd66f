"""Quantised weights: nothing overflows, nothing divides by zero, nobody forgets a scale."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
from specjax.drafters.fp8 import lay_over, quantize

from specjax import decode, plugins, testing
from specjax.model.decoder import FP8, project

fp8 = plugins.load_drafter("fp8")


def back(weight):
    values, scale = quantize(jnp.asarray(weight, jnp.float32))
    assert values.dtype == FP8
    assert scale.dtype == jnp.float32
    return np.asarray(values.astype(jnp.float32)), np.asarray(scale)


def test_values_beyond_the_largest_number_are_clipped_not_nan():
    """The cast alone would give NaN above 464."""
    values, scale = back([[1000.0, 448, 464, 465, -1000]])
    assert np.isnan(np.asarray(jnp.asarray([1000.0, 465.0]).astype(FP8).astype(jnp.float32))).all()
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values * scale, [[1000, 448, 464, 465, -1000]], rtol=0.0626)
    np.testing.assert_allclose(scale, [1000 / 448], rtol=1e-6)
    assert np.abs(values).max() == 448


def test_a_scale_rounded_down_still_clips():
    """Random channels: the largest weight never leaves the range, however absmax / 448 was rounded."""
    weight = np.random.default_rng(0).normal(0, 1, (4000, 16)).astype(np.float32)
    values, scale = back(weight)
    assert np.isfinite(values).all()
    assert (np.abs(values).max(1) == 448).all()
    error = np.abs(values * scale[:, None] - weight)
    assert (
        error <= np.maximum(np.abs(weight) / 16, scale[:, None] * 2.0**-10) * 1.001
    ).all()  # 3 bits, then subnormals


def test_scales_are_float32_a_channel_s_largest_weight_comes_back_as_it_was():
    """Fault: scales rounded to bfloat16, which moves it by up to 0.4 %."""
    weight = np.random.default_rng(5).normal(size=(256, 32)).astype(np.float32)
    values, scale = back(weight)
    largest = np.abs(weight).argmax(1)[:, None]
    found, given = (np.take_along_axis(part, largest, 1) for part in (values * scale[:, None], weight))
    np.testing.assert_allclose(found, given, rtol=3e-7)


@pytest.mark.parametrize("channel", [[0.0] * 4, [1e-30, 0, -1e-30, 0], [1e-38, 0, 0, 0], [3e38, -3e38, 0, 1]])
def test_empty_tiny_and_huge_channels_stay_finite_and_zeros_stay_zero(channel):
    values, scale = back([channel, [1, 2, 3, 4]])
    assert np.isfinite(values).all()
    assert np.isfinite(scale).all()
    assert (scale > 0).all()
    assert (values[0][np.asarray(channel) == 0] == 0).all()
    np.testing.assert_allclose(values[1] * scale[1], [1, 2, 3, 4], rtol=0.07)  # its neighbour is unharmed


def test_one_outlier_costs_its_own_channel_only():
    weight = np.ones((2, 8), np.float32)
    weight[0, 0] = 1e6
    values, scale = back(weight)
    np.testing.assert_allclose(values[1] * scale[1], 1, rtol=1e-6)


@functools.partial(jax.jit, static_argnames="model")
def forward(model, params, tokens):
    cache = model.init_cache(1, 16, jnp.float32)
    hidden = model.forward(params, tokens, cache, jnp.zeros(1, jnp.int32)).hidden
    return model.logits(params, hidden)


@pytest.fixture(scope="module")
def quantised(tiny):
    model, params = tiny
    own = fp8.params(jax.random.key(0), model, params)
    small = fp8.model(model)

    run = jax.jit(lambda own: forward(small, lay_over(params, own), jnp.asarray([[1, 2, 3, 4, 5]])))
    return own, run


def test_each_quantised_product_is_within_five_percent_of_the_full_one(tiny, quantised):
    """Rounding to 4 significant bits: 2.6 % expected for independent errors, whatever the number of inputs."""
    own, _ = quantised
    x = jax.random.normal(jax.random.key(1), (1, 200, 48))
    for block, linear in LINEARS:
        full = tiny[1]["layers"][1][block][linear]["weight"]
        part = own["layers"][1][block][linear]
        inputs = x[..., : full.shape[1]]
        exact = project(inputs, full)
        error = project(inputs, part["weight"]) * part["scale"][None, None] - exact
        assert 0 < jnp.linalg.norm(error) / jnp.linalg.norm(exact) < 0.05


def test_the_quantised_forward_is_close_to_the_full_one(tiny, quantised):
    own, run = quantised
    exact = forward(*tiny, jnp.asarray([[1, 2, 3, 4, 5]]))
    assert 0 < jnp.linalg.norm(run(own) - exact) / jnp.linalg.norm(exact) < 0.15


LINEARS = [("self_attn", f"{n}_proj") for n in "qkvo"] + [("mlp", f"{n}_proj") for n in ("gate", "up", "down")]


@pytest.mark.parametrize(("block", "linear"), LINEARS)
def test_every_quantised_weight_is_used_with_its_scale(quantised, block, linear):
    own, run = quantised
    changed = copy.deepcopy(own)
    layer = changed["layers"][1][block][linear]
    assert layer["weight"].dtype == FP8
    layer["scale"] = layer["scale"] * 2
    assert jnp.linalg.norm(run(changed) - run(own)) > 1e-3


def test_only_linear_layers_are_quantised_and_nothing_else_is_held(quantised, tiny):
    own, _ = quantised
    assert set(own) == {"layers"}  # embedding, final norm and head are the target's
    for layer in own["layers"].values():
        assert {(block, name) for block, parts in layer.items() for name in parts} == set(LINEARS)  # no norms
        assert all(set(part) == {"weight", "scale"} for parts in layer.values() for part in parts.values())
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(own) if leaf.dtype == FP8)
    assert held == sum(leaf.size for leaf in jax.tree.leaves(tiny[1]["layers"]) if leaf.ndim == 2)


def test_a_quantised_target_keeps_its_scales(tiny):
    model, params = tiny
    part = {"layers": {0: {"mlp": {"up_proj": params["layers"][0]["mlp"]["up_proj"]}}}}
    once = fp8.params(jax.random.key(0), model, part)
    twice = fp8.params(jax.random.key(0), fp8.model(model), once)
    for again, leaf in zip(jax.tree.leaves(twice), jax.tree.leaves(once), strict=True):
        np.testing.assert_allclose(again.astype(jnp.float32), leaf.astype(jnp.float32), rtol=1e-6)


def test_biases_and_norms_of_heads_stay_the_targets():
    model, params = testing.tiny_model(num_layers=2, attention_bias=True, qk_norm=True)
    own = fp8.params(jax.random.key(0), model, params)
    assert set(own["layers"][0]["self_attn"]["q_proj"]) == {"weight", "scale"}
    whole = lay_over(params, own)
    attention, full = whole["layers"][1]["self_attn"], params["layers"][1]["self_attn"]
    assert attention["q_proj"]["bias"] is full["q_proj"]["bias"]
    assert attention["k_norm"]["weight"] is full["k_norm"]["weight"]
    assert attention["q_proj"]["weight"].dtype == FP8
    exact, close = (forward(m, w, jnp.asarray([[1, 2, 3]])) for m, w in ((model, params), (fp8.model(model), whole)))
    assert jnp.linalg.norm(close - exact) < 0.2 * jnp.linalg.norm(exact)


def test_quantising_leaves_the_targets_own_forward_as_it_was(tiny, quantised):
    model, params = tiny
    tokens = jnp.asarray([[1, 2, 3, 4, 5]])
    before = forward(model, params, tokens)
    own, run = quantised
    run(own)
    np.testing.assert_array_equal(forward(model, params, tokens), before)


def test_the_own_cache_has_the_target_caches_dtype_and_a_shared_one_is_handed_back(tiny):
    model, params = tiny
    for kv, leaves in (("own", 2 * model.num_layers), ("shared", 0)):
        chosen = plugins.load_drafter("fp8", {"kv": kv})
        own = chosen.params(jax.random.key(0), model, params)
        held = chosen.init(own, model, 3, 16, jnp.bfloat16)
        assert [leaf.dtype for leaf in jax.tree.leaves(held)] == [jnp.bfloat16] * leaves
        state = subjects.start_rows(model, params, chosen, own, [[1, 2, 3]] * 3, 5)
        draft = jax.eval_shape(functools.partial(decode.propose, decode.Program(model, chosen)), params, own, state)
        assert jax.tree.structure((draft.cache, draft.state)) == jax.tree.structure((state.cache, state.drafter))


def test_an_unknown_kind_of_cache_is_refused():
    with pytest.raises(ValueError, match="kv='mine': must be one of shared, own"):
        plugins.load_drafter("fp8", {"kv": "mine"})
