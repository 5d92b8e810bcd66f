"""Targets in bfloat16 and in e4m3, and a drafter's checkpoint of another padding and dtype."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
from specjax.drafters.fp8 import lay_over

from specjax import LanguageModel, plugins, testing, weights
from specjax.drafter import Nothing
from specjax.engine import Engine
from specjax.model import Llama

PROMPTS = [[3, 4, 5, 3, 4, 5], [7], [1, 2, 8, 9, 1, 2, 8, 9, 1, 2]]
NEW = 24


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    subjects.compile_quickly(monkeypatch)


def texts(model, params, chosen, prompts=PROMPTS):
    generations = Engine(LanguageModel.of(model, params), chosen).generate(
        prompts, max_new_tokens=NEW, seed=0, capacity=64
    )
    return [generation.tokens for generation in generations], [generation.counts for generation in generations]


def test_in_bfloat16_a_text_leaves_the_plain_models_choice_at_near_ties_only(tiny):
    """Every emitted token, fed to the plain model: its largest logit, or within two units of bfloat16 of it."""
    model, params = tiny
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    found, _ = texts(model, params, plugins.load_drafter("ngram", {"num_speculative_tokens": "3"}))
    forward = jax.jit(lambda tokens, cache: model.logits(params, model.forward(params, tokens, cache, start).hidden)[0])
    start = jnp.zeros(1, jnp.int32)
    for prompt, text in zip(PROMPTS, found, strict=True):
        whole = np.zeros((1, 64), np.int32)
        whole[0, : len(prompt) + NEW] = prompt + text
        logits = np.asarray(forward(jnp.asarray(whole), model.init_cache(1, 64, jnp.bfloat16)))
        rows = logits[len(prompt) - 1 : len(prompt) - 1 + NEW]
        unit = 2.0 ** (np.floor(np.log2(np.abs(rows).max(-1))) - 7)  # bfloat16 has 8 significant bits
        assert (rows.max(-1) - rows[np.arange(NEW), text] <= 2 * unit).all()


def test_a_quantised_target_keeps_its_own_text_and_accepts_itself(tiny):
    model, params = tiny
    fp8 = plugins.load_drafter("fp8", {"num_speculative_tokens": "2"})
    own = fp8.params(jax.random.key(0), model, params)
    quantised, whole = fp8.model(model), lay_over(params, own)
    plain, _ = texts(quantised, whole, Nothing())
    assert texts(quantised, whole, plugins.load_drafter("ngram"))[0] == plain
    found, counts = texts(quantised, whole, fp8)
    assert found == plain
    assert all((count.accepted == count.drafted).all() for count in counts)


def test_a_drafters_checkpoint_may_have_another_padding_and_dtype(tmp_path):
    """Both have 61 ids; rows of padding hold garbage that would win every draft."""
    model, params = testing.tiny_model(num_layers=2, tied_embeddings=False)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)

    def padded(rows, dtype):
        wide = Llama(dataclasses.replace(model.config, padded_vocab_size=rows))
        pad = lambda leaf: jnp.pad(leaf, ((0, rows - 61), (0, 0)), constant_values=50.0)  # noqa: E731
        heads = {name: {"weight": pad(params[name]["weight"])} for name in ("embed_tokens", "lm_head")}
        return wide, jax.tree.map(lambda leaf: leaf.astype(dtype), params | heads)

    wide, stored = padded(128, jnp.bfloat16)
    weights.save(tmp_path / "draft", wide.config, stored)
    target, own = padded(64, jnp.float32)
    external = plugins.load_drafter("external", {"num_speculative_tokens": "3", "checkpoint": str(tmp_path / "draft")})
    found, counts = texts(target, own, external)
    assert found == texts(target, own, Nothing())[0]
    assert max(max(text) for text in found) < 61
    assert all((count.accepted == count.drafted).all() for count in counts)
