"""What the compiler makes of the round: no second cache, no second copy of weights, one compilation, no host."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import LanguageModel, decode, memory
from specjax.engine import Engine
from specjax.memory.buffers import PHASES
from specjax.memory.compiler import QUICK, lower
from specjax.memory.round_trace import state_shapes
from specjax.mesh import nbytes
from specjax.model import Llama
from specjax.plugins import load_drafter
from specjax.testing import tiny_config, tiny_model
from specjax.types import Prompts

STRATEGIES = {
    "none": ("none", {}),
    "ngram": ("ngram", {"num_speculative_tokens": "2"}),
    "early-exit": ("early-exit", {"num_speculative_tokens": "2"}),
    "fp8 on the target's cache": ("fp8", {"num_speculative_tokens": "2"}),
    "fp8 on its own cache": ("fp8", {"num_speculative_tokens": "2", "kv": "own"}),
    "external": ("external", {"num_speculative_tokens": "2"}),
}
SIZES = {"batch": 4, "capacity": 4096, "cache_dtype": jnp.float32}


def large(spec, settings):
    """A program whose weights and cache dwarf all else, as shapes."""
    model = Llama(
        tiny_config(
            vocab_size=512, hidden_size=512, intermediate_size=2048, num_layers=2, num_heads=4, num_kv_heads=4,
            head_dim=128, context_length=8192,
        )
    )  # fmt: skip
    drafter = load_drafter(spec, settings)
    params = model.shapes()
    own = jax.eval_shape(lambda key, weights: drafter.params(key, model, weights), jax.random.key(0), params)
    return decode.Program(model, drafter), params, own


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_pays_for_a_second_cache_or_a_second_copy_of_weights(name):
    subject = large(*STRATEGIES[name])
    account = memory.account(*subject, **SIZES)
    found = memory.compiled(*subject, **SIZES)
    named = max(account.phase_bytes(phase, "buffers") for phase in PHASES)
    held = account.phase_bytes("verify", "weights") + account.phase_bytes("verify", "kv")
    assert found.temp_bytes - named < 0.02 * held
    state = state_shapes(*subject, **SIZES)
    assert found.alias_bytes == sum(nbytes(leaf) for leaf in jax.tree.leaves(state))  # all of it is donated
    assert found.total_bytes == pytest.approx(account.needed_bytes, rel=0.02)


def test_a_round_alone_needs_no_more_than_the_loop_of_them():
    program, params, own = large(*STRATEGIES["ngram"])
    state = state_shapes(program, params, own, **SIZES)
    step = memory.compiler.read(decode.step.lower(program, params, own, state).compile(QUICK))
    held = memory.account(program, params, own, **SIZES).needed_bytes
    assert step.total_bytes == pytest.approx(held, rel=0.02)
    assert step.alias_bytes == sum(nbytes(leaf) for leaf in jax.tree.leaves(state))


def test_a_program_that_keeps_a_copy_of_its_cache_is_caught():
    """The assertion above rejects the fault it is for: a round that holds old and new cache at once."""
    program, params, own = large("none", {})
    state = state_shapes(program, params, own, **SIZES)

    def hoarding(params, state):
        new = decode.decode_round(program, params, own, state)
        pairs = zip(state.cache.layers, new.cache.layers, strict=True)
        kept = sum(jnp.sum(old[0] * fresh[0][:, :, ::-1]) for old, fresh in pairs)
        return new, kept

    found = memory.compiler.read(jax.jit(hoarding, donate_argnums=1).lower(params, state).compile(QUICK))
    account = memory.account(program, params, own, **SIZES)
    held = account.phase_bytes("verify", "weights") + account.phase_bytes("verify", "kv")
    assert found.temp_bytes - account.phase_bytes("verify", "buffers") > 0.02 * held


def test_shapes_of_the_state_are_those_that_the_loop_starts_with():
    program, params, own = large(*STRATEGIES["external"])
    expected = state_shapes(program, params, own, **SIZES)
    fields = {field.name: getattr(expected, field.name) for field in dataclasses.fields(Prompts)}
    start = functools.partial(decode.start, program, cache_dtype=jnp.dtype(jnp.float32), longest=64)
    state = jax.eval_shape(start, params, own, Prompts(**fields))
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for real, shape in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (real.shape, real.dtype) == (shape.shape, shape.dtype)


def test_another_prompt_temperature_limit_or_seed_compiles_nothing():
    model, params = tiny_model(num_layers=2)
    engine = Engine(LanguageModel.of(model, params), load_drafter("early-exit", {"num_speculative_tokens": "2"}))
    engine.generate([[1, 2, 3]], max_new_tokens=4, seed=0)
    functions = (decode.empty, decode.read_chunk, decode.observe_chunk, decode.first_token, decode.run)
    before = [function._cache_size() for function in functions]
    same = Engine(LanguageModel.of(model, params), load_drafter("early-exit", {"num_speculative_tokens": "2"}))
    same.generate([[5, 4, 3, 2, 1]], max_new_tokens=9, seed=7, temperature=0.7, top_k=5, top_p=0.9)
    assert [function._cache_size() for function in functions] == before


def test_a_first_round_with_fresh_arrays_and_a_second_with_its_results_share_a_compilation():
    model, params = tiny_model(num_layers=2)
    engine = Engine(LanguageModel.of(model, params), load_drafter("ngram", {"num_speculative_tokens": "2"}))
    state = engine.start([[1, 2, 3]], max_new_tokens=9, seed=0)
    before = decode.step._cache_size()
    for _ in range(3):  # a weak type in the first state would compile a second time
        state = decode.step(engine.program, params, engine.drafter_params, state)
    assert decode.step._cache_size() == before + 1


def test_the_loop_moves_nothing_between_host_and_device():
    model, params = tiny_model(num_layers=2)
    engine = Engine(LanguageModel.of(model, params), load_drafter("ngram", {"num_speculative_tokens": "2"}))
    state = engine.start([[1, 2, 3]], max_new_tokens=9, seed=0)
    with jax.transfer_guard("disallow"):
        state = decode.run(engine.program, params, engine.drafter_params, state)
    assert int(np.asarray(state.length)[0]) == 12
    text = lower(engine.program, params, (), batch=1, capacity=128, cache_dtype=jnp.float32).as_text()
    assert not any(word in text for word in ("callback", "infeed", "outfeed"))


def test_a_consumed_state_is_refused_by_name_of_the_fault():
    model, params = tiny_model(num_layers=2)
    engine = Engine(LanguageModel.of(model, params), load_drafter("none"))
    state = engine.start([[1, 2, 3]], max_new_tokens=2, seed=0, capacity=128)
    decode.run(engine.program, params, engine.drafter_params, state)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        decode.run(engine.program, params, engine.drafter_params, state)
