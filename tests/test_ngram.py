"""Prompt lookup against a brute-force reference, and the cases that other implementations got wrong."""

import jax.numpy as jnp
import numpy as np
import pytest
from specjax.drafters.ngram import NGram, find_match

SLOTS = 24


def reference(ids: list[int], longest: int, shortest: int, window: int) -> list[int]:
    """Longest suffix first, latest match first, continuation cut at the end of the text."""
    for n in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for first in range(len(ids) - n - 1, -1, -1):
            if ids[first : first + n] == ids[-n:]:
                return ids[first + n : first + n + window]
    return []


def lookup(texts: list[list[int]], longest: int, shortest: int, window: int, stale: int = 1) -> list[list[int]]:
    tokens = np.full((len(texts), SLOTS), stale, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    length = jnp.asarray([len(text) for text in texts], jnp.int32)
    first, count = find_match(jnp.asarray(tokens), length, longest, shortest)
    return [tokens[row, first[row] : first[row] + min(int(count[row]), window)].tolist() for row in range(len(texts))]


@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (3, 1), (4, 2), (2, 2), (1000, 1), (20, 3)])
def test_the_longest_then_latest_match_wins_on_random_texts(longest, shortest):
    random = np.random.default_rng(longest * 10 + shortest)
    texts = [random.integers(0, 4, random.integers(1, SLOTS)).tolist() for _ in range(400)]
    expected = [reference(text, longest, shortest, 5) for text in texts]
    assert lookup(texts, longest, shortest, 5) == expected
    assert any(expected)
    assert not all(expected)


def test_the_latest_of_equal_matches_is_copied():
    assert lookup([[1, 2, 9, 1, 2, 8, 1, 2]], 2, 2, 2) == [[8, 1]]


@pytest.mark.parametrize("text", [[1, 2, 3, 4, 5], [6], [3, 4]])
def test_a_text_without_a_match_drafts_nothing(text):
    assert lookup([text], 3, 1, 4, stale=text[-1]) == [[]]


def test_ids_beyond_the_text_are_never_matched_nor_copied():
    assert lookup([[5, 1, 2]], 2, 1, 4, stale=2) == [[]]
    assert lookup([[5, 2, 5]], 1, 1, 4, stale=9) == [[2, 5]]


def test_a_suffix_may_overlap_its_own_match_and_the_draft_ends_with_the_text():
    assert lookup([[7, 7, 7, 7]], 2, 2, 5) == [[7]]
    assert lookup([[7, 7, 7, 7]], 1, 1, 5) == [[7]]


@pytest.mark.parametrize("bad", [{"prompt_lookup_min": 0}, {"prompt_lookup_min": 4}, {"prompt_lookup_max": 0}])
def test_window_bounds_out_of_order_are_refused(bad):
    with pytest.raises(ValueError, match="must be 1 <= min <= max"):
        NGram(**bad)
