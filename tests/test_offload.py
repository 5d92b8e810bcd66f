"""A drafter's weights in host memory: the same tokens, other memory, and a refusal where there is none."""

import types

import jax
import pytest

from specjax import Engine, LanguageModel, offload, plugins


def test_weights_wait_in_host_memory_and_greedy_text_is_the_plain_decoders(tiny, greedy_texts):
    model, params = tiny
    kind = plugins.load_drafter("external", {"num_speculative_tokens": "2", "keep_layers": "1"})
    kind, own = offload.move(kind, kind.params(jax.random.key(0), model, params))
    engine = Engine(LanguageModel.of(model, params), kind, drafter_params=own)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(engine.drafter_params)} == {"pinned_host"}
    assert offload.size(engine.drafter_params) > 0
    assert offload.fetch_s(engine.drafter_params) > 0
    prompt, text = greedy_texts[5]
    [answer] = engine.generate([prompt], max_new_tokens=9, seed=0, capacity=64)
    assert answer.tokens == text[:9]


def test_without_weights_nothing_is_offloaded_and_the_program_is_the_same(tiny):
    kind = plugins.load_drafter("ngram")
    assert offload.move(kind, own := kind.params(jax.random.key(0), *tiny)) == (kind, own)
    assert offload.fetch_s(own) == 0


def test_a_place_or_a_backend_without_it_is_refused():
    with pytest.raises(ValueError, match="offload='attic': must be one of host"):
        offload.check("attic")
    memory = types.SimpleNamespace(kind="device")
    bare = types.SimpleNamespace(platform="abacus", addressable_memories=lambda: [memory])
    with pytest.raises(ValueError, match="abacus has no memory of the kind pinned_host, only device"):
        offload.check("host", bare)
