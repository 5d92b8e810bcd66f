"""The rules of `specjax/drafter.py`, held against every drafter of the repository."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
from subjects import CAPACITY, run_rows

from specjax import decode, drafter, sampling
from specjax.drafter import Nothing
from specjax.engine import Engine
from specjax.types import Target

K = 3
ALL = {"none": Nothing(), **subjects.drafters(K)}
PROMPTS = [[5], [3, 4, 5, 3, 4, 5], [7, 7, 7, 7, 7, 7, 7, 7]]

DRAFTERS = Path(__file__).parent.parent / "drafters"

every_drafter = pytest.mark.parametrize("name", ALL)


@pytest.fixture(scope="module", params=ALL)
def proposal(request, tiny):
    """A drafter, its weights, a batch some rounds into its text, and its compiled `propose`."""
    model, params = tiny
    chosen = ALL[request.param]
    weights = chosen.params(jax.random.key(0), model, params)
    done = run_rows(model, params, chosen, weights, PROMPTS, 9, temperature=[1.0, 0.7, 0.0])
    state = dataclasses.replace(done.state, done=jnp.zeros(3, bool), limit=done.state.limit + 20)
    propose = jax.jit(decode.propose, static_argnames="program", compiler_options=subjects.QUICK)

    def call(state):
        with jax.debug_key_reuse(True):  # a key that is consumed twice raises
            return propose(decode.Program(model, chosen), params, weights, state)

    return chosen, state, call


def test_every_drafter_of_the_repository_is_tested():
    files = {name.removesuffix("-shared").removesuffix("-own") for name in ALL}
    assert set(drafter.available()) == files
    assert {path.stem.replace("_", "-") for path in DRAFTERS.glob("[!_]*.py")} <= files


@every_drafter
def test_a_drafter_is_a_frozen_value_equal_to_one_built_again(name):
    chosen = ALL[name]
    again = dataclasses.replace(chosen)
    assert chosen == again
    assert hash(chosen) == hash(again)
    assert all(f"{field.name}=" in repr(chosen) for field in dataclasses.fields(chosen))  # it prints itself in reports
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.num_speculative_tokens = 5


@every_drafter
def test_an_equal_drafter_another_prompt_temperature_limit_or_seed_compiles_nothing(tiny, name):
    model, params = tiny
    weights = ALL[name].params(jax.random.key(0), model, params)
    run_rows(model, params, ALL[name], weights, PROMPTS, 9)
    sizes = subjects.compilations()
    again = dataclasses.replace(ALL[name])
    sampler = sampling.make_sampling(3, 0.7, top_k=5, top_p=0.9, min_p=0.1)
    run_rows(
        model,
        params,
        again,
        weights,
        [[1, 2], [3], [4] * 9],
        [0, 1, 20],
        seed=9,
        rows=[4, 1, 8],
        end_ids=[2],
        sampler=sampler,
    )
    assert subjects.compilations() == sizes


@every_drafter
def test_own_weights_never_hold_the_targets_arrays(tiny, name):
    model, params = tiny
    target = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    own = jax.tree.leaves(ALL[name].params(jax.random.key(0), model, params))
    assert not target & {leaf.unsafe_buffer_pointer() for leaf in own}
    assert len({leaf.unsafe_buffer_pointer() for leaf in own}) == len(own)  # so that each can be donated


def test_the_state_keeps_its_tree_shapes_dtypes_and_weak_types(proposal):
    chosen, state, call = proposal
    before = (state.drafter, state.cache)

    def either(old, new):
        return jax.lax.cond(True, lambda: old, lambda: new)

    draft = call(state)
    jax.eval_shape(either, before, (draft.state, draft.cache))  # a trace-time error if they differ
    weak = [leaf.weak_type for leaf in jax.tree.leaves(draft)]
    assert not any(weak)


def test_a_draft_has_the_declared_width_a_count_within_it_and_laws_in_float32(proposal):
    chosen, state, call = proposal
    draft = call(state)
    assert draft.tokens.shape == (3, chosen.num_speculative_tokens)
    assert draft.tokens.dtype == draft.count.dtype == jnp.int32
    assert ((draft.count >= 0) & (draft.count <= chosen.num_speculative_tokens)).all()
    if draft.log_q is not None:
        assert draft.log_q.dtype == jnp.float32
        np.testing.assert_allclose(np.exp(draft.log_q).sum(-1), 1, rtol=1e-5)


def test_only_committed_tokens_and_slots_are_read(proposal):
    """Everything beyond the text turns to garbage, and nothing changes."""
    _, state, call = proposal
    slot = np.arange(CAPACITY)[None]
    stale = jnp.asarray(slot >= np.asarray(state.length)[:, None] - 1)[:, None, :, None]
    older = jnp.asarray(slot >= np.asarray(state.length)[:, None] - 2)[:, None, :, None]  # fed again by the drafter
    poisoned = dataclasses.replace(
        state,
        tokens=jnp.where(slot < state.length[:, None], state.tokens, 7),
        cache=jax.tree.map(lambda leaf: jnp.where(stale, 1e4, leaf), state.cache),
        drafter=jax.tree.map(lambda leaf: jnp.where(older, 1e4, leaf), state.drafter),
    )
    clean, draft = call(state), call(poisoned)
    real = np.arange(clean.tokens.shape[1])[None] < np.asarray(clean.count)[:, None]
    np.testing.assert_array_equal(draft.count, clean.count)
    np.testing.assert_array_equal(np.where(real, draft.tokens, 0), np.where(real, clean.tokens, 0))
    if clean.log_q is not None:
        np.testing.assert_array_equal(draft.log_q, clean.log_q)


def test_only_scratch_slots_are_written(proposal):
    """The target's cache below length - 1, and the drafter's own below length - 2, keep their bits."""
    _, state, call = proposal
    draft = call(state)
    for kept, before, after in ((1, state.cache, draft.cache), (2, state.drafter, draft.state)):
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            for row, length in enumerate(np.asarray(state.length)):
                np.testing.assert_array_equal(old[row, :, : length - kept], new[row, :, : length - kept])


def test_log_q_is_the_law_that_the_tokens_were_drawn_from(proposal):
    """Two thousand drafts: the favourite of each reported law is drawn as often as it says, filters included."""
    chosen, state, call = proposal
    state = dataclasses.replace(
        state, sampling=sampling.make_sampling(3, [1.0, 0.7, 0.0], top_k=[0, 4, 0], top_p=[0.9, 1.0, 1.0])
    )
    surprise = variance = hits = 0
    for seed in range(700 if chosen.num_speculative_tokens else 1):
        draft = call(dataclasses.replace(state, keys=sampling.row_keys(seed, range(3))))
        if draft.log_q is None:  # a point mass: the very same draft whatever the key
            return np.testing.assert_array_equal(draft.tokens, call(state).tokens)
        q = np.exp(np.asarray(draft.log_q, np.float64))
        drawn = np.take_along_axis(q, np.asarray(draft.tokens)[..., None], -1)[..., 0]
        assert (drawn > 0).all()
        np.testing.assert_allclose(drawn[2], 1, rtol=1e-6)  # temperature 0: certain of the token
        assert (np.count_nonzero(q[1], axis=-1) <= 4).all()
        favourite = q.argmax(-1)
        share = q.max(-1)
        hit = np.asarray(draft.tokens) == favourite
        hits += hit[:2].sum()
        surprise += (hit - share)[:2].sum()
        variance += (share * (1 - share))[:2].sum()
    assert variance > 100
    assert abs(surprise) < 4 * np.sqrt(variance)


@pytest.mark.parametrize("path", sorted(DRAFTERS.glob("[!_]*.py")), ids=lambda p: p.stem)
def test_a_drafter_makes_no_randomness_of_its_own(path):
    """It draws with the keys that it is given, whose role is its own, and which verification never uses."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"random", "PRNGKey", "key", "default_rng"}


def test_draft_acceptance_and_further_token_have_keys_of_their_own(tiny, monkeypatch):
    model, params = tiny
    seen = {}

    class Spy(Nothing):
        def propose(self, keys, params, state, target):
            seen["draft"] = jax.random.key_data(keys)
            return super().propose(keys, params, state, target)

    uniforms, draw = sampling.uniforms, sampling.draw
    monkeypatch.setattr(
        sampling, "uniforms", lambda keys, n: (seen.update(accept=jax.random.key_data(keys)), uniforms(keys, n))[1]
    )
    monkeypatch.setattr(
        sampling, "draw", lambda keys, law: (seen.update(extra=jax.random.key_data(keys)), draw(keys, law))[1]
    )
    state = subjects.start_rows(model, params, Nothing(), (), PROMPTS, 9)

    def keys_of_a_round(state):
        decode.decode_round(decode.Program(model, Spy()), params, (), state)
        return dict(seen)

    first = jax.jit(keys_of_a_round, compiler_options=subjects.QUICK)(state)
    second = jax.jit(keys_of_a_round, compiler_options=subjects.QUICK)(
        dataclasses.replace(state, round=state.round + 1)
    )
    found = [tuple(key) for keys in (first, second) for leaf in keys.values() for key in np.asarray(leaf).tolist()]
    assert len(found) == len(set(found)) == 2 * 3 * 3


@every_drafter
def test_the_shipped_engine_gives_the_plain_text_twice_and_hands_out_fresh_buffers(tiny, greedy_texts, name):
    """The real `jit`s, donation included: two calls with the same prompts."""
    model, params = tiny
    engine = Engine(model, params, ALL[name])
    chosen = [greedy_texts[i] for i in (0, 5, 7)]
    for _ in range(2):
        got = engine.generate([prompt for prompt, _ in chosen], max_new_tokens=20, seed=0, capacity=CAPACITY)
        assert [g.tokens for g in got] == [text[:20] for _, text in chosen]
        assert all(g.finish == "length" for g in got)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves((engine.params, engine.drafter_params)))


def test_a_target_shows_a_drafter_what_the_types_say(tiny):
    fields = [field.name for field in dataclasses.fields(Target)]
    assert fields == ["model", "params", "cache", "tokens", "length", "hidden", "sampling"]
