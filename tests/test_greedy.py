"""Every drafter, every window, every prompt length and limit, whatever was accepted: the plain decoder's text."""

import itertools

import numpy as np
import pytest
import subjects
from specjax.drafters.fp8 import lay_over
from subjects import (
    BATCH,
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

from specjax.drafter import Nothing

KS = range(1, 9)


def grid(texts, k):
    """Every prompt with every limit, in batches whose rows differ in both; long rows together, for they take time."""
    cells = sorted(itertools.product(limits(k), texts), key=lambda cell: cell[0] == LONGEST)
    short, long = cells[: -len(texts)], cells[-len(texts) :]
    while long:
        yield [long.pop(0), short.pop(0), *((long[:1] and [long.pop(0)]) or [short.pop(0)])]
    third = -(-len(short) // BATCH)
    for index in range(third):
        yield [short[(index + row * third) % len(short)] for row in range(BATCH)]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_plain_decoders_for_every_prompt_length_and_limit(tiny, greedy_texts, weights, name, k):
    model, params = tiny
    extra = accepted = 0
    for index, batch in enumerate(grid(greedy_texts, k)):
        poison = [index % 2 == 0, False, True]  # stale slots and tokens may hold anything
        rows = run_rows(
            model, params, tampered(name, k), tamper(weights[name], k, poison),
            [prompt for _, (prompt, _) in batch], [limit for limit, _ in batch],
        )  # fmt: skip
        check_greedy(batch, rows)
        accepted += sum(c["accepted"].sum() for c in rows.counts)
        extra += sum((c["accepted"] < c["drafted"]).sum() for c in rows.counts)
    assert accepted > 0  # both happened
    assert extra > 0


def test_greedy_text_is_the_plain_decoders_without_a_drafter(tiny, greedy_texts):
    for batch in grid(greedy_texts, 1):
        prompts, new = [prompt for _, (prompt, _) in batch], [limit for limit, _ in batch]
        check_greedy(batch, run_rows(*tiny, Nothing(), (), prompts, new))


@pytest.fixture(scope="module")
def transparent(tiny):
    """A target that every model drafter equals, the drafters' weights for it, and its greedy texts."""
    model, params = tiny
    params = subjects.transparent(model, params)
    texts = subjects.greedy_texts(model, params)
    return model, params, subjects.own_weights(model, params), texts


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ngram"])
def test_a_drafter_equal_to_the_target_is_always_accepted_after_any_number_of_acceptances(transparent, name, k):
    model, params, weights, texts = transparent
    prompts = [texts[i][0] for i in (0, 3, 8)]
    for first in range(0, k + 1, BATCH):
        accept = [min(first + row, k) for row in range(BATCH)]
        for temperature in (0.0, 1.0)[: 2 if first == 0 else 1]:
            rows = run_rows(
                model, params, tampered(name, k), tamper(weights[name], accept if temperature == 0 else k, True),
                prompts, LONGEST, temperature=temperature,
            )  # fmt: skip
            for row, counts in enumerate(rows.counts):
                due = np.minimum(counts["drafted"], accept[row] if temperature == 0 else k)
                np.testing.assert_array_equal(counts["accepted"], due)  # exactly: no draft was lost on the way
                assert (counts["emitted"] == due + 1).all()


@pytest.mark.parametrize("name", ["external", "fp8-own"])
def test_a_drafters_own_cache_has_no_hole_and_no_rejected_token_after_partial_acceptance(transparent, name):
    model, params, weights, texts = transparent
    prompts = [texts[i][0] for i in (0, 3, 8)]
    rows = run_rows(model, params, tampered(name, 4), tamper(weights[name], [0, 2, 4]), prompts, [17, 18, 16])
    final = rows.state
    own = subjects.drafters(4)[name]
    whole = lay_over(params, weights[name]) if name == "fp8-own" else weights[name]
    clean = clean_prefill(own.model(model), whole, np.asarray(final.tokens), final.length)
    assert_same_slots(final.drafter, clean, final.length - 2)  # the last two are fed again by the next round
