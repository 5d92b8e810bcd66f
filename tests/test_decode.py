"""The loop gives the plain decoder's text, whatever drafts, wherever it is cut, whoever stands beside."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
from subjects import (
    BATCH,
    CAPACITY,
    LONGEST,
    NAMES,
    assert_same_slots,
    check_greedy,
    clean_prefill,
    limits,
    run_rows,
    tamper,
    tampered,
)  # fmt: skip

from specjax import LanguageModel, decode, plugins, sampling, testing
from specjax.drafter import Nothing
from specjax.engine import Engine, NotFiniteError

KS = range(1, 9)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    subjects.compile_quickly(monkeypatch)


@pytest.mark.parametrize(  # tests/test_greedy.py has every drafter with every window, in batches of three
    ("name", "k"), [(name, KS[(i + far) % len(KS)]) for i, name in enumerate(NAMES) for far in (0, 4)]
)
def test_greedy_text_is_the_plain_decoders_in_a_batch_of_one(tiny, greedy_texts, weights, name, k):
    model, params = tiny
    for index, limit in enumerate(limits(k)):
        prompt, text = greedy_texts[(index + k) % len(greedy_texts)]
        check_greedy(
            [(limit, (prompt, text))],
            run_rows(model, params, subjects.drafters(k)[name], weights[name], [prompt], limit),
        )


@pytest.mark.parametrize("k", KS)
def test_greedy_text_survives_hostile_silent_and_flickering_drafters(tiny, greedy_texts, k):
    model, params = tiny
    cells = [(limit, text) for limit, text in itertools.product(limits(k), greedy_texts[::4])]
    for limit, (prompt, text) in cells:
        kinds = [subjects.HOSTILE, subjects.SILENT, subjects.FLICKER]
        whole = np.tile(np.pad(prompt + text, (0, CAPACITY - len(prompt + text))), (BATCH, 1))
        script = {"kind": jnp.asarray(kinds), "tokens": jnp.asarray(whole, jnp.int32), "accept": jnp.full(3, k)}
        rows = run_rows(model, params, subjects.Scripted(k), script, [prompt] * BATCH, limit, end_ids=[28])
        assert rows.tokens == [text[:limit]] * BATCH


# Acceptance: what the drafter knows, and what the counts say.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_drafting_for_itself_is_accepted_at_rate_one(tiny, temperature):
    model, params = tiny
    self_drafter = testing.Self(3)
    weights = self_drafter.params(jax.random.key(0), model, params)
    rows = run_rows(*tiny, self_drafter, weights, [[1], [2, 3], [4, 5, 6]], 33, temperature=temperature)
    for counts in rows.counts:
        np.testing.assert_array_equal(counts["accepted"], counts["drafted"])
        assert counts["drafted"].sum() == 24  # 32 tokens in 8 rounds of 4, no draft in vain
        np.testing.assert_allclose(counts["overlap"], counts["tested"], rtol=1e-4)


@pytest.mark.parametrize("k", KS)
def test_forced_acceptances_emit_one_more_token_each_round_and_rows_do_not_disturb_each_other(tiny, greedy_texts, k):
    chosen = [greedy_texts[i] for i in (0, 4, 8)]
    whole = np.stack([np.pad(p + t, (0, CAPACITY - len(p + t))) for p, t in chosen])
    for first in range(0, k + 1, BATCH):
        accept = [min(first + 2 * row, k) for row in range(BATCH)]
        script = {
            "kind": jnp.full(BATCH, subjects.ORACLE), "tokens": jnp.asarray(whole, jnp.int32),
            "accept": jnp.asarray(accept),
        }  # fmt: skip
        rows = run_rows(*tiny, subjects.Scripted(k), script, [p for p, _ in chosen], LONGEST)
        assert rows.tokens == [text for _, text in chosen]
        for a, counts in zip(accept, rows.counts, strict=True):
            full, rest = divmod(LONGEST - 1, a + 1)
            assert counts["emitted"].tolist() == [a + 1] * full + [rest] * (rest > 0)
            assert counts["drafted"].max(initial=0) <= k
            np.testing.assert_array_equal(counts["accepted"], counts["emitted"] - 1)


@pytest.mark.parametrize("accept", [(4, 1), (0, 4), (2, 0)])
def test_the_cache_after_partial_acceptance_equals_a_clean_prefill(tiny, greedy_texts, accept):
    """Keys, values and lengths of the target, for rows that accepted different counts."""
    model, params = tiny
    chosen = [greedy_texts[2], greedy_texts[6]]
    whole = np.stack([np.pad(p + t, (0, CAPACITY - len(p + t))) for p, t in chosen]).astype(np.int32)
    oracle = testing.Oracle(4)
    script = {"tokens": jnp.asarray(whole), "accept": jnp.asarray(accept)}
    rows = run_rows(model, params, oracle, script, [p for p, _ in chosen], 20)
    length = jnp.asarray([len(p) + 20 for p, _ in chosen], jnp.int32)
    clean = clean_prefill(model, params, whole, length)
    assert_same_slots(rows.state.cache, clean, length - 1)
    np.testing.assert_array_equal(rows.state.length, length)


# Where the text ends.


@pytest.mark.parametrize("k", [1, 4])
def test_an_end_id_at_any_index_of_the_window_ends_the_text_there(tiny, greedy_texts, k):
    prompt, text = greedy_texts[2]
    whole = np.tile(np.pad(prompt + text, (0, CAPACITY - len(prompt + text))), (BATCH, 1))
    script = {
        "kind": jnp.asarray([subjects.ORACLE, subjects.HOSTILE, subjects.ORACLE]),
        "tokens": jnp.asarray(whole, jnp.int32), "accept": jnp.asarray([k, k, k // 2]),
    }  # fmt: skip
    seen = set()
    for index in range(2 * k + 3):
        end = text[index]
        first = text.index(end)
        rows = run_rows(*tiny, subjects.Scripted(k), script, [prompt] * 3, LONGEST, end_ids=[28, end])
        assert rows.tokens == [text[: first + 1]] * 3
        for counts in rows.counts:
            assert counts["emitted"].sum() == first  # the counts say what was emitted, not what was accepted
            assert (counts["accepted"] <= counts["emitted"]).all()
        seen.add(first)
    assert set(range(k + 2)) <= seen  # the prefill's token, every index of the first window


def test_a_finished_row_is_frozen_while_others_go_on(tiny, greedy_texts):
    model, params = tiny
    chosen = greedy_texts[:3]
    whole = np.stack([np.pad(p + t, (0, CAPACITY - len(p + t))) for p, t in chosen]).astype(np.int32)
    rows = run_rows(
        model, params, testing.Oracle(4), {"tokens": jnp.asarray(whole), "accept": jnp.full(3, 2)},
        [p for p, _ in chosen], [3, 33, 0],
    )  # fmt: skip
    state = rows.state
    assert rows.tokens == [chosen[0][1][:3], chosen[1][1], []]
    assert state.length.tolist() == [1 + 3, 2 + 33, 3]
    np.testing.assert_array_equal(np.asarray(state.tokens)[0, 4:], 0)  # nothing beyond the text
    assert_same_slots(state.cache, clean_prefill(model, params, whole, state.length), state.length - 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_fills_the_cache_to_the_last_slot_is_right(tiny, greedy_texts, weights, name):
    """Drafts beyond the end are invalid, not clamped: committed slots keep their content."""
    model, params = tiny
    prompts = [greedy_texts[i][0] for i in (0, 4, 8)]
    new = [CAPACITY - len(prompt) for prompt in prompts]
    rows = run_rows(model, params, tampered(name, 8), tamper(weights[name], 8, True), prompts, new)
    plain = run_rows(model, params, Nothing(), (), prompts, new)
    assert rows.tokens == plain.tokens
    assert rows.state.length.tolist() == [CAPACITY] * 3
    assert [tokens[:33] for tokens in rows.tokens] == [greedy_texts[i][1] for i in (0, 4, 8)]
    assert_same_slots(rows.state.cache, plain.state.cache, rows.state.length - 1)


def test_a_long_run_keeps_length_and_cache_in_step(tiny):
    """A hundred rounds of mixed acceptance: the last token is still the plain decoder's."""
    model, params = tiny
    own = plugins.load_drafter("external", {"num_speculative_tokens": "2"})
    weights = own.params(jax.random.key(0), model, params)
    rows = run_rows(*tiny, own, weights, [[1, 2]] * 3, 200, capacity=256)
    for end in (50, 150, 200):
        logits = subjects.plain_logits(model.config, params, [1, 2, *rows.tokens[0][: end - 1]])[-1]
        assert int(np.argmax(logits)) == rows.tokens[0][end - 1]


def test_a_prompt_longer_than_a_prefill_chunk_is_read_whole(tiny):
    model, params = tiny
    prompt = np.random.default_rng(0).integers(0, 29, 3 * decode.PREFILL_CHUNK - 5).tolist()
    text, _ = subjects.plain_greedy(model, params, prompt, 4)
    engine = Engine(LanguageModel.of(model, params), Nothing())
    others = [prompt[: decode.PREFILL_CHUNK], prompt[: decode.PREFILL_CHUNK + 1]]
    got = engine.generate([prompt, *others], max_new_tokens=4, seed=0, capacity=256)
    assert got[0].tokens == text
    for other, generation in zip(others, got[1:], strict=True):
        assert generation.tokens == subjects.plain_greedy(model, params, other, 4)[0]


def test_a_sliding_window_smaller_than_the_text_does_not_change_it():
    """Stale drafts behind a full window must not be seen; other engines refuse or corrupt here."""
    model, params = testing.tiny_model(
        num_layers=2, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8, vocab_size=29,
        sliding_window=8,
    )  # fmt: skip
    prompts = [[1], [5, 6, 7, 8, 9], list(range(1, 15))]
    texts = [subjects.plain_greedy(model, params, prompt, 30)[0] for prompt in prompts]
    whole = np.stack([np.pad(p + t, (0, CAPACITY - len(p + t))) for p, t in zip(prompts, texts, strict=True)])
    script = {"tokens": jnp.asarray(whole, jnp.int32), "accept": jnp.asarray([0, 1, 3])}
    assert run_rows(model, params, testing.Oracle(3), script, prompts, 30).tokens == texts


# Randomness: a row's tokens depend on its prompt, its seed and its number, and on nothing else.


@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_row_is_the_same_alone_in_a_batch_padded_and_at_another_index(tiny, weights, name):
    model, params = tiny
    k, prompt, others = 3, [4, 9, 4, 9, 4], [[7] * 9, [1]]
    chosen = subjects.drafters(k)[name]

    def run(prompts, rows, capacity=CAPACITY, temperature=1.0):
        drafted = run_rows(
            model, params, chosen, weights[name], prompts, 24, temperature=temperature, seed=3, rows=rows,
            capacity=capacity,
        )  # fmt: skip
        return drafted.tokens

    alone = run([prompt], [5])[0]
    assert run([prompt, *others], [5, 0, 1])[0] == alone
    assert run([*others, prompt], [0, 1, 5], temperature=[0.3, 0.0, 1.0])[2] == alone
    assert run([prompt], [5], capacity=2 * CAPACITY)[0] == alone
    assert run([prompt, *others], [6, 0, 1])[0] != alone  # another row number, another text
    assert len(set(alone)) > 3


def test_rows_at_temperature_zero_are_greedy_beside_sampled_ones(tiny, greedy_texts, weights):
    model, params = tiny
    prompts = [greedy_texts[i][0] for i in (1, 4, 7)]
    rows = run_rows(
        model, params, tampered("external", 3), tamper(weights["external"], 3), prompts, 33,
        sampler=sampling.make_sampling(3, [0.0, 1.0, 1e-8], top_k=[0, 5, 0], top_p=[1.0, 0.9, 1.0]),
    )  # fmt: skip
    assert rows.tokens[0] == greedy_texts[1][1]
    assert rows.tokens[1] != greedy_texts[4][1]
    assert rows.tokens[2] == greedy_texts[7][1]


def test_the_same_request_gives_the_same_text_as_the_first_and_the_tenth_call(tiny):
    model, params = tiny
    engine = Engine(LanguageModel.of(model, params), Nothing())

    def once(seed=7):
        jax.random.normal(jax.random.key(0), (3,))  # unrelated use of randomness
        np.random.default_rng().random()
        return [
            g.tokens for g in engine.generate([[1, 2], [3]], max_new_tokens=12, seed=seed, temperature=1.0, capacity=64)
        ]

    first = once()
    assert all(once() == first for _ in range(9))
    assert once(seed=8) != first
    distinct = {tuple(once(seed)[0]) for seed in range(20)}
    assert len(distinct) >= 15


def test_streaming_gives_the_text_of_the_compiled_loop_round_by_round(tiny, greedy_texts):
    model, params = tiny
    prompt, text = greedy_texts[5]
    engine = Engine(LanguageModel.of(model, params), plugins.load_drafter("ngram", {"num_speculative_tokens": "3"}))
    stream, pieces = engine.stream(prompt, max_new_tokens=12, seed=0, capacity=64), []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            final = end.value
            break
    assert sum(pieces, []) == text[:12] == final.tokens
    assert [len(piece) for piece in pieces[1:]] == final.counts.emitted.tolist()
    assert final.finish == "length"


# Logits that are not numbers.


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_raise_with_the_position_and_keep_what_was_emitted(value):
    """Token 3's row of the table is poisoned: the text stops where a token would be drawn from it."""
    laws = np.zeros((6, 5))
    laws[:, 0] = 1.0
    for token, follower in ((0, 1), (1, 2), (2, 3)):
        laws[token] = np.eye(5)[follower]
    params = testing.table_params(laws)
    params["table"] = params["table"].at[3, 1].set(value)
    model = testing.TableModel(5, order=1)
    for chosen in (Nothing(), testing.Silent(2)):
        with pytest.raises(NotFiniteError, match=r"logits of row 0 are not finite at position 4") as error:
            Engine(LanguageModel.of(model, params), chosen).generate([[0], [4]], max_new_tokens=9, seed=0, capacity=32)
        bad, good = error.value.generations
        assert (bad.tokens, bad.finish) == ([1, 2, 3], "not_finite")
        assert (good.tokens, good.finish) == ([0, 1, 2, 3], "not_finite")


def test_a_poisoned_row_does_not_disturb_its_neighbour(tiny):
    model, params = testing.TableModel(4, order=1), testing.table_params(np.tile(np.eye(4)[[1, 2, 0, 3, 0]], 1))
    params["table"] = params["table"].at[3].set(np.nan)
    with pytest.raises(NotFiniteError, match="row 1") as error:
        Engine(LanguageModel.of(model, params), Nothing()).generate([[0], [3]], max_new_tokens=6, seed=0, capacity=32)
    good, bad = error.value.generations
    assert (good.tokens, good.finish) == ([1, 2, 0, 1, 2, 0], "length")
    assert (bad.tokens, bad.finish) == ([], "not_finite")


def test_the_draft_gated_by_the_logits_after_the_last_token_is_rejected_when_they_say_so():
    """Prompt [1, 1, 1], a drafter that copies 1, a target that says 2 after 1."""
    laws = np.eye(4)[[0, 2, 2, 3, 0]]
    model, params = testing.TableModel(4, order=1), testing.table_params(laws)
    for k in (1, 3):
        chosen = plugins.load_drafter("ngram", {"num_speculative_tokens": str(k)})
        assert run_rows(model, params, chosen, (), [[1, 1, 1]], 4).tokens == [[2, 2, 2, 2]]
