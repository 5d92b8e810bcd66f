"""Laws from logits against an independent implementation, and draws from laws against their frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import sampling
from specjax.sampling import log_probs, make_sampling


def plain_law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """One row, in words: heat, keep the k largest, then the smallest set of mass top_p, then those near the largest."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    weight = np.exp((logits - logits.max()) / temperature)
    law = weight / weight.sum()
    if top_k:
        smallest = sorted(law, reverse=True)[min(top_k, len(law)) - 1]
        law = np.where(law >= smallest, law, 0)
        law /= law.sum()
    if top_p < 1:
        mass, smallest = 0.0, 0.0
        for value in sorted(law, reverse=True):
            if mass >= top_p:
                break
            mass, smallest = mass + value, value
        law = np.where(law >= smallest, law, 0)
        law /= law.sum()
    law = np.where(law >= min_p * law.max(), law, 0)
    return law / law.sum()


compiled = jax.jit(log_probs)


def law_of(logits, **options):
    logits = jnp.asarray(logits, jnp.float32)
    batch = logits.shape[0]
    return np.exp(compiled(logits[:, None], make_sampling(batch, **({"temperature": 1.0} | options)))[:, 0])


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 3},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.8},
    {"top_p": 1e-3},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"temperature": 0.5, "top_p": 0.83},
    {"temperature": 2.0, "top_k": 4, "top_p": 0.71},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.91, "min_p": 0.4},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_the_law_is_temperature_then_top_k_then_top_p_then_min_p(options):
    logits = np.random.default_rng(0).normal(0, 2, (40, 11)).astype(np.float32)
    want = np.stack([plain_law(row, **({"temperature": 1.0} | options)) for row in logits])
    np.testing.assert_allclose(law_of(logits, **options), want, atol=2e-6)


def test_every_row_has_options_of_its_own():
    logits = np.random.default_rng(1).normal(0, 2, (len(SETTINGS), 11)).astype(np.float32)
    full = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options for options in SETTINGS]
    together = law_of(logits, **{name: [options[name] for options in full] for name in full[0]})
    for row, options in enumerate(full):
        np.testing.assert_allclose(together[row], plain_law(logits[row], **options), atol=2e-6)
        np.testing.assert_array_equal(together[row], law_of(logits[row : row + 1], **options)[0])  # and bit for bit


def test_the_order_of_the_filters_matters_and_is_the_documented_one():
    """p = .4 .3 .2 .1: top-k 2 leaves 4/7, 3/7; top-p .5 on that keeps one token, on p it would keep two."""
    law = law_of(np.log([[0.4, 0.3, 0.2, 0.1]]), top_k=2, top_p=0.5)
    np.testing.assert_allclose(law, [[1, 0, 0, 0]], atol=1e-6)
    law = law_of(np.log([[0.4, 0.3, 0.2, 0.1]]), top_p=0.65, min_p=0.7)
    np.testing.assert_allclose(law, [[4 / 7, 3 / 7, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}])
def test_ties_at_a_threshold_are_kept_together(options):
    np.testing.assert_allclose(law_of([[1.0, 0, 0, -1, 0]], **options)[0, [1, 2, 4]], 1 / (3 + np.e), atol=1e-6)


def test_ties_at_temperature_zero_go_to_the_lowest_id():
    np.testing.assert_array_equal(law_of([[1.0, 5, 5, 5]], temperature=0), [[0, 1, 0, 0]])


def test_top_p_one_keeps_every_token_however_unlikely():
    logits = np.concatenate([[0.0], np.full(1000, -25.0)])[None]
    assert (law_of(logits, top_p=1.0, top_k=1001) > 0).all()
    assert (law_of(logits) > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-30, 1e-45, 1e-3])
def test_cold_laws_are_finite_and_certain_of_the_largest_logit(temperature):
    logits = np.random.default_rng(2).normal(0, 9, (50, 7)).astype(np.float32)
    law = law_of(logits, temperature=temperature)
    np.testing.assert_array_equal(law.argmax(-1), logits.argmax(-1))
    np.testing.assert_allclose(law.max(-1), 1, atol=1e-3)
    assert np.isfinite(law).all()


def test_no_step_of_a_batch_of_mixed_temperatures_makes_a_nan():
    logits = jnp.asarray(np.random.default_rng(3).normal(0, 3, (4, 1, 5)), jnp.float32)
    mixed = make_sampling(4, [0.0, 1.0, 0.0, 0.7], top_k=[0, 2, 2, 0])
    with jax.debug_nans(True):
        law = log_probs(logits, mixed)
    np.testing.assert_array_equal(law[0], log_probs(logits, make_sampling(4, 0.0))[0])


@pytest.mark.parametrize(
    "options", [{"top_p": 1e-40}, {"top_p": 1e-45}, {"top_p": 1e-38}, {"top_p": 1e-40, "top_k": 2}]
)
@pytest.mark.parametrize("temperature", [1.0, 1e-40, 1e38])
def test_the_most_probable_token_is_kept_whatever_is_left_out(options, temperature):
    logits = np.array([[0.5, 3.0, -1.0, 1.0], [2.0, 1.0, 0.0, 7.0]])
    law = law_of(logits, **options, temperature=temperature)
    assert law[[0, 1], [1, 3]].min() > 0
    np.testing.assert_allclose(law.sum(-1), 1, rtol=1e-6)
    if temperature <= 1:
        np.testing.assert_array_equal(law, np.eye(4)[[1, 3]])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 50.0])
def test_no_temperature_turns_the_order_of_the_logits_upside_down(temperature):
    law = law_of([[3.0, 2.0, 1.0]], temperature=temperature)[0]
    assert law[0] >= law[1] >= law[2]
    assert law[0] > law[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_logit_has_probability_zero_and_a_row_of_them_is_uniform(temperature):
    law = law_of([[np.nan, 1, 2, 1], [np.nan] * 4, [-np.inf, np.nan, 0, -np.inf]], temperature=temperature)
    assert law[0, 0] == 0
    assert law[0].argmax() == 2
    np.testing.assert_allclose(law[0].sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(law[1], [0.25] * 4 if temperature else [1, 0, 0, 0])
    np.testing.assert_array_equal(law[2], [0, 0, 1, 0])


def test_infinite_logits_share_the_law():
    np.testing.assert_allclose(law_of([[np.inf, 0, np.inf, 1]]), [[0.5, 0, 0.5, 0]])


def test_logits_in_bf16_are_brought_to_float32_before_anything_else():
    logits = jnp.asarray(np.random.default_rng(4).normal(0, 2, (3, 1, 500)), jnp.bfloat16)
    law = log_probs(logits, make_sampling(3, 0.7, top_p=0.9))
    assert law.dtype == jnp.float32
    np.testing.assert_array_equal(law, log_probs(logits.astype(jnp.float32), make_sampling(3, 0.7, top_p=0.9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1: must be finite and >= 0"),
        ({"temperature": [0.0, -1.0]}, r"temperature=\[0\.0, -1\.0\]: must be finite and >= 0"),
        ({"temperature": float("nan")}, "temperature=nan: must be finite"),
        ({"temperature": float("inf")}, "temperature=inf: must be finite"),
        ({"top_p": 0}, r"top_p=0: must be finite and in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p=1\.01: must be finite and in \(0, 1\]"),
        ({"top_p": 1e-60}, r"top_p=1e-60: must be finite and in \(0, 1\]"),  # zero in float32
        ({"top_k": -1}, "top_k=-1: must be finite and >= 0"),
        ({"min_p": -0.5}, r"min_p=-0\.5: must be finite and in \[0, 1\]"),
        ({"min_p": 1.5}, r"min_p=1\.5: must be finite and in \[0, 1\]"),
    ],
)
def test_an_option_outside_its_range_is_refused_by_name_value_and_range(options, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(2, **options)


# Drawing.


drawn = jax.jit(sampling.draw)


def keys_of(rows, seed=0):
    return sampling.row_keys(seed, range(rows))


def chi_square(tokens, law):
    """p-value of the counts; tokens of probability zero must not occur."""
    counts = np.bincount(np.asarray(tokens), minlength=len(law))
    assert counts[law == 0].sum() == 0
    return stats.chisquare(counts[law > 0], counts.sum() * law[law > 0] / law.sum()).pvalue


def test_draws_have_the_frequencies_of_their_law():
    law = np.asarray([0.5, 0.2, 0.0, 0.2, 0.0999, 0.0001])
    with np.errstate(divide="ignore"):
        rows = jnp.broadcast_to(jnp.asarray(np.log(law), jnp.float32), (200_000, 6))
    tokens = drawn(keys_of(200_000), rows)
    assert chi_square(tokens, law) > 1e-3
    assert chi_square(tokens, np.asarray([0.49, 0.21, 0.0, 0.2, 0.0999, 0.0001])) < 1e-6  # the test can see one percent


def test_a_draw_depends_on_its_own_row_only():
    laws = jnp.log(jnp.asarray(np.random.default_rng(5).dirichlet(np.ones(50), 64), jnp.float32))
    keys = keys_of(64)
    together = np.asarray(drawn(keys, laws))
    order = np.random.default_rng(6).permutation(64)
    np.testing.assert_array_equal(drawn(keys[order], laws[order]), together[order])
    np.testing.assert_array_equal(
        np.concatenate([drawn(keys[i : i + 1], laws[i : i + 1]) for i in range(64)]), together
    )
    certain = jnp.where(jnp.arange(64)[:, None] < 63, jnp.log(jax.nn.one_hot(jnp.arange(64) % 50, 50)), laws)
    np.testing.assert_array_equal(drawn(keys, certain)[:63], np.arange(63) % 50)
    assert drawn(keys, certain)[63] == together[63]


def test_a_batch_of_point_masses_draws_their_tokens():
    laws = jnp.log(jax.nn.one_hot(jnp.asarray([3, 0, 4]), 5))
    np.testing.assert_array_equal(drawn(keys_of(3), laws), [3, 0, 4])


def test_noise_is_fine_enough_for_tokens_that_plain_float32_noise_never_reaches(monkeypatch):
    """One float32 uniform ends at 1 - 2^-24, so that its Gumbel noise ends at 16.6; ours must go on."""
    seen = []
    categorical = jax.random.categorical

    def spy(key, logits, **options):
        seen.append(options)
        return categorical(key, logits, **options)

    monkeypatch.setattr(jax.random, "categorical", spy)
    sampling.draw(keys_of(2), jnp.log(jnp.full((2, 3), 1 / 3)))
    assert seen == [{"mode": "high"}]


def test_uniforms_lie_in_the_half_open_interval_and_are_uniform():
    u = np.asarray(sampling.uniforms(keys_of(1000), 50)).ravel()
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3


def test_rows_rounds_roles_and_positions_never_share_a_key():
    seen = set()
    rows = keys_of(50)
    for turn in range(8):
        for role in (sampling.DRAFT, sampling.ACCEPT, sampling.BONUS):
            keys = sampling.fold(sampling.fold(rows, turn), role)
            for position in [keys, *(sampling.fold(keys, i) for i in range(4))]:
                seen |= {tuple(k) for k in np.asarray(jax.random.key_data(position)).tolist()}
    assert len(seen) == 50 * 8 * 3 * 5


def test_a_rows_key_depends_on_seed_and_row_number_only():
    data = jax.random.key_data
    np.testing.assert_array_equal(data(sampling.row_keys(3, [5, 9]))[1], data(sampling.row_keys(3, [9]))[0])
    assert (data(sampling.row_keys(3, [9])) != data(sampling.row_keys(4, [9]))).any()
    for seed in (-1, 3 + 2**32):  # JAX would cut them to another seed's 32 bits
        with pytest.raises(ValueError, match=f"seed={seed}: must be 0 to 4294967295"):
            sampling.row_keys(seed, [9])
