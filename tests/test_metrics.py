"""Figures from raw counts, against values from theory and the faults of other code bases."""

import json
import math

import numpy as np
import pytest

from specjax import engine, metrics, testing
from specjax.types import Counts


def counts(drafted, accepted, emitted, *, tested=None, overlap=None, cut=None):
    """Counts of one prompt; by default every round tests up to its first rejection and is not cut."""
    drafted, accepted, emitted = (np.asarray(x, np.int32) for x in (drafted, accepted, emitted))
    tested = np.minimum(accepted + 1, drafted) if tested is None else np.asarray(tested, np.int32)
    overlap = np.zeros(drafted.shape, np.float32) if overlap is None else np.asarray(overlap, np.float32)
    cut = np.zeros(drafted.shape, bool) if cut is None else np.asarray(cut, bool)
    return Counts(drafted, tested, accepted, emitted, overlap, cut)


def rounds(num_tokens, accepted):
    accepted = np.asarray(accepted)
    return counts(np.full(accepted.shape, num_tokens), accepted, accepted + 1)


@pytest.mark.parametrize(("num_tokens", "length"), [(1, 1.8), (2, 2.44), (4, 3.3616), (8, 4.3289)])
def test_a_fixed_token_acceptance_gives_the_length_of_theory_and_flat_rates_for_every_k(num_tokens, length):
    # 5^8 rounds hold each acceptance pattern of 8 tests at 4/5 as often as theory says, without noise.
    total = 5**8
    at_least = [total * 4**i // 5**i for i in range(num_tokens + 1)] + [0]
    pattern = [at_least[i] - at_least[i + 1] for i in range(num_tokens + 1)]
    summary = metrics.summarize([rounds(num_tokens, np.repeat(np.arange(num_tokens + 1), pattern))])
    assert summary.acceptance_length == pytest.approx(length, abs=5e-5)
    assert summary.per_position == pytest.approx([0.8] * num_tokens)
    assert summary.per_position_marginal == pytest.approx([0.8 ** (i + 1) for i in range(num_tokens)])


def test_accepts_4_0_2_of_4_are_a_rate_of_one_half_and_a_length_of_three():
    summary = metrics.summarize([rounds(4, [4, 0, 2])])
    assert summary.acceptance_rate == 0.5
    assert summary.acceptance_length == 3.0
    assert summary.per_position == pytest.approx([2 / 3, 1, 1 / 2, 1])


def test_an_end_of_sequence_inside_the_window_counts_what_was_emitted():
    # [d1, d2, EOS, d4, d5, bonus]: all five are accepted by the rule, three reach the output.
    cut = counts([5], [3], [3], tested=[5], cut=[True])
    summary = metrics.summarize([cut])
    assert (summary.emitted, summary.accepted, summary.cut_rounds) == (3, 3, 1)
    assert summary.acceptance_length == 3.0
    assert summary.per_position == (1.0, 1.0, 1.0)  # positions 4 and 5 decided nothing


def test_an_end_of_sequence_as_the_first_token_of_a_window_is_one_emitted_token():
    summary = metrics.summarize([counts([4], [1], [1], tested=[4], cut=[True])])
    assert (summary.emitted, summary.accepted, summary.acceptance_length) == (1, 1, 1.0)


def test_drafted_counts_the_observed_drafts_not_slots_and_not_k_times_rounds():
    assert metrics.summarize([rounds(7, [7] * 10)]).drafted == 70  # 8 slots a round
    misses = counts([0, 4, 2, 0], [0, 4, 1, 0], [1, 5, 2, 1])
    summary = metrics.summarize([misses])
    assert (summary.drafted, summary.accepted) == (6, 5)
    assert summary.acceptance_rate == pytest.approx(5 / 6)
    assert summary.acceptance_length == 9 / 4  # rounds without a draft are rounds


def test_drafted_tested_and_accepted_are_three_counters():
    summary = metrics.summarize([counts([4, 4], [1, 0], [2, 1], tested=[2, 1])])
    assert (summary.drafted, summary.tested, summary.accepted) == (8, 3, 1)


def test_a_drafter_that_never_drafts_has_no_rate_and_length_one():
    summary = metrics.summarize([counts([0, 0], [0, 0], [1, 1]), counts([0], [0], [1])])
    assert summary.acceptance_rate is None
    assert summary.overlap is None
    assert summary.acceptance_length == 1.0
    assert summary.per_position == ()


@pytest.mark.parametrize("prompts", [[], [rounds(4, [])], [rounds(4, []), rounds(4, [])]])
def test_prompts_without_a_round_have_no_ratios_and_no_nan(prompts):
    summary = metrics.summarize(prompts)
    assert summary.prompts == summary.rounds == 0
    assert summary.acceptance_length is None
    assert summary.acceptance_length_prompt_mean is None
    assert summary.acceptance_length_quantiles is None
    assert "NaN" not in json.dumps(summary.as_json(), allow_nan=False)


def test_the_pooled_length_is_not_the_mean_over_prompts():
    short, long = rounds(4, [4]), rounds(4, [0] * 9)
    summary = metrics.summarize([short, long])
    assert summary.acceptance_length == 14 / 10
    assert summary.acceptance_length_prompt_mean == 3.0
    assert summary.acceptance_length_quantiles == pytest.approx((1.4, 3.0, 4.6))


def test_alpha_is_the_overlap_of_the_tested_tokens():
    summary = metrics.summarize([counts([4, 4], [1, 0], [2, 1], overlap=[1.5, 0.25])])
    assert summary.overlap == pytest.approx(1.75 / 3)


def test_conditional_rates_are_of_the_rounds_that_reached_a_position():
    summary = metrics.summarize([counts([4, 4, 1], [2, 0, 1], [3, 1, 2])])
    assert summary.per_position == pytest.approx([2 / 3, 1, 0])
    assert summary.per_position_marginal == pytest.approx([2 / 3, 1 / 2, 0])


def test_the_interval_resamples_prompts_and_covers_the_truth_as_often_as_it_says():
    # Prompts differ (a rate each), so resampling tokens would give intervals that are far too short.
    random = np.random.default_rng(0)
    covered, trials, num_prompts, num_rounds = 0, 200, 24, 100
    for trial in range(trials):
        rates = random.choice([0.2, 0.8], num_prompts)
        emitted = 1 + random.binomial(1, rates[:, None], (num_prompts, num_rounds)).sum(1) / num_rounds
        low, high = metrics.bootstrap(emitted * num_rounds, [num_rounds] * num_prompts, seed=trial)
        covered += low <= 1.5 <= high
    assert 0.86 <= covered / trials <= 1.0  # 95 % nominal; a percentile bootstrap of 24 prompts has about 93 %


def test_the_interval_needs_two_prompts_and_repeats_with_its_seed():
    assert metrics.summarize([rounds(4, [1, 2])]).acceptance_length_interval is None
    prompts = [rounds(4, [1, 2, 0]), rounds(4, [4, 4]), rounds(4, [0, 0, 1, 0])]
    first, again = (metrics.summarize(prompts, seed=3).acceptance_length_interval for _ in range(2))
    assert first == again
    assert first[0] < metrics.summarize(prompts).acceptance_length < first[1]


def test_the_models_estimate_divides_tokens_by_the_cost_of_a_round():
    length = sum(0.8**i for i in range(5))  # a = .8, K = 4, a draft step costs .3 of a target step
    assert metrics.expected_speedup(length, 4 * 0.3, 1.0, 1.0) == pytest.approx(3.3616 / 2.2)
    assert metrics.expected_speedup(None, 1.0, 1.0, 1.0) is None
    assert metrics.expected_speedup(1.0, 0.0, 0.0, 1.0) is None


@pytest.fixture(scope="module")
def decode():
    """Decode two prompts with a drafter that is always right, on a target that compiles fast."""
    laws = np.random.default_rng(0).dirichlet(np.ones(7), 8)
    target = engine.LanguageModel.of(testing.TableModel(7, order=1), testing.table_params(laws))
    perfect = engine.Engine(target, testing.Self(3))
    return lambda budget: perfect.generate([[1, 2, 3], [4]], max_new_tokens=budget, seed=0)


def test_real_counts_add_up_to_the_text_and_the_first_token_is_in_no_round(decode):
    generations = decode(14)
    for generation in generations:
        assert sum(generation.counts.emitted) == len(generation.tokens) - 1
    summary = metrics.summarize([generation.counts for generation in generations])
    assert summary.acceptance_length == pytest.approx(13 / 4)  # 3 full rounds of 4, and the last token
    assert summary.per_position == (1.0, 1.0, 1.0)
    assert summary.acceptance_rate == 1.0


@pytest.mark.parametrize("budget", [0, 1])
def test_a_request_without_rounds_is_no_division_by_zero(decode, budget):
    summary = metrics.summarize([generation.counts for generation in decode(budget)])
    assert summary.rounds == 0
    assert summary.acceptance_length is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in summary.as_json().values())
