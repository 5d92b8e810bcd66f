"""A drafter's weights in host memory: the same tokens, other memory, and a refusal where there is none."""

import types

import jax
import pytest

from specjax import Engine, drafter, offload


def test_weights_wait_in_host_memory_and_greedy_text_is_the_plain_decoders(tiny, greedy_texts):
    model, params = tiny
    kind = drafter.load("external", {"num_speculative_tokens": "2", "keep_layers": "1"})
    engine = Engine(model, params, kind, offload="host")
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(engine.drafter_params)} == {"pinned_host"}
    assert offload.size(engine.drafter_params) > 0
    assert offload.fetch_s(engine.drafter_params) > 0
    prompt, text = greedy_texts[5]
    [answer] = engine.generate([prompt], max_new_tokens=9, seed=0, capacity=64)
    assert answer.tokens == text[:9]


def test_without_weights_nothing_is_offloaded_and_the_program_is_the_same(tiny):
    here, there = (Engine(*tiny, drafter.load("ngram"), offload=place) for place in ("", "host"))
    assert here.program == there.program
    assert offload.fetch_s(there.drafter_params) == 0


def test_a_place_or_a_backend_without_it_is_refused():
    with pytest.raises(ValueError, match="offload='attic': must be one of host"):
        offload.check("attic")
    memory = types.SimpleNamespace(kind="device")
    bare = types.SimpleNamespace(platform="abacus", addressable_memories=lambda: [memory])
    with pytest.raises(ValueError, match="abacus has no memory of the kind pinned_host, only device"):
        offload.check("host", bare)
