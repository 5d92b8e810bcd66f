"""Verification of one window, given laws as numbers: what is accepted, what remains, what is emitted.

Right and wrong laws of the fixtures F3 and F4 are computed from theory in the issue tracker's collection of
faults; each wrong one lies many standard errors from the tolerance used here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from subjects import QUICK

from specjax import sampling, verify
from specjax.types import Cache, Draft
from specjax.verify import Token, is_exact

ROWS = 200_000
F3 = ([0.1, 0.6, 0.3], [0.5, 0.3, 0.2])
F4 = ([0.6, 0.2, 0.1, 0.1], [0.7, 0.2, 0.05, 0.05])
NOISE = ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1])
WRONG = {
    "F3": [
        (0.05, 0.7125, 0.2375), (0.2, 0.6, 0.2), (0.14, 0.54, 0.32), (0.216, 0.456, 0.328), (0.1, 0.567, 0.333),
        (0.5, 0.3, 0.2), (0, 0.675, 0.325), (0.1, 0.623, 0.277),
    ],
    "F4": [
        (0.42, 0.04, 0.27, 0.27), (0.857, 0, 0.071, 0.071), (0.66, 0.22, 0.06, 0.06), (0.624, 0.224, 0.076, 0.076),
        (0.6, 0.25, 0.075, 0.075), (0.7, 0.2, 0.05, 0.05), (0, 0.2, 0.4, 0.4),
    ],
    "noise": [(0.1, 0.2, 0.267, 0.433), (0.25, 0.267, 0.245, 0.237)],
}  # fmt: skip


def log(law):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(np.asarray(law, np.float64)), jnp.float32)


def rows_of(law, rows=ROWS):
    return jnp.broadcast_to(log(law), (rows, *np.shape(law)))


def chain(tokens, log_q, parents=None, depth=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    parents = None if parents is None else jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape)
    return Draft(tokens, log_q, Cache(()), (), parents=parents, depth=depth)


@functools.partial(jax.jit, static_argnames="rule", compiler_options=QUICK)
def verified(rule, keys, log_p, draft, live):
    return rule.verify(keys, log_p, draft, live)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def decide(rule, log_p, draft, live, u):
    return rule.decide(log_p, draft, live, u)


def emit(log_p, draft, seed=0, rule=None):
    """First emitted token of each row, and which rows accepted a draft."""
    rows, nodes = draft.tokens.shape
    verdict = verified(
        rule or Token(), sampling.row_keys(seed, range(rows)), log_p, draft, jnp.ones((rows, nodes), bool)
    )
    first = jnp.take_along_axis(draft.tokens, jnp.maximum(verdict.path[:, :1], 0), 1)[:, 0]
    return np.where(verdict.accepted > 0, first, verdict.bonus), np.asarray(verdict.accepted) > 0


def drafted(q, nodes=1, seed=0):
    """Tokens drawn from q with the very keys that a drafter gets."""
    keys = sampling.fold(sampling.row_keys(seed, range(ROWS)), sampling.DRAFT)
    return jnp.stack([drawn(sampling.fold(keys, i), rows_of(q)) for i in range(nodes)], 1)


drawn = jax.jit(sampling.draw, compiler_options=QUICK)


def assert_law(tokens, law, tolerance=4.0):
    """Frequencies within four standard errors of the law, and nothing of probability zero."""
    law = np.asarray(law)
    counts = np.bincount(tokens, minlength=len(law))
    error = np.abs(counts / len(tokens) - law)
    assert (counts[law == 0] == 0).all()
    assert (error <= tolerance * np.sqrt(law * (1 - law) / len(tokens)) + 1e-12).all(), counts / len(tokens)


@pytest.mark.parametrize(("name", "fixture", "rate"), [("F3", F3, 0.6), ("F4", F4, 0.9), ("noise", NOISE, 0.6)])
def test_the_emitted_law_is_the_targets_and_the_acceptance_is_the_overlap(name, fixture, rate):
    p, q = fixture
    tokens, accepted = emit(rows_of([p, p]), chain(drafted(q), rows_of([q])))
    assert_law(tokens, p)
    assert abs(accepted.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / ROWS)
    for wrong in WRONG[name]:  # and no known fault could have passed
        assert np.abs(np.asarray(wrong) - p).max() > 10 * np.sqrt(0.25 / ROWS)


@pytest.mark.parametrize(("fixture", "rate"), [(F3, 0.29), (F4, 0.47)])
def test_a_point_mass_is_exact_for_any_proposer_and_accepts_the_sum_of_pq(fixture, rate):
    p, q = fixture
    tokens, accepted = emit(rows_of([p, p]), chain(drafted(q), None))
    assert_law(tokens, p)
    assert abs(accepted.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / ROWS)


@pytest.mark.parametrize(("fixture", "rate"), [(F3, 0.1), (F4, 0.6)])
def test_the_drafters_favourite_token_as_a_point_mass_is_accepted_as_often_as_the_target_wants_it(fixture, rate):
    p, q = fixture
    tokens, accepted = emit(rows_of([p, p]), chain(np.full((ROWS, 1), np.argmax(q)), None))
    assert_law(tokens, p)
    assert abs(accepted.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / ROWS)


def test_a_token_that_the_target_gives_half_is_accepted_half_of_the_time():
    p = [0.5, 0.5]
    _, accepted = emit(rows_of([p, p]), chain(np.zeros((ROWS, 1)), None))
    assert abs(accepted.mean() - 0.5) < 0.005


@pytest.mark.parametrize(("filters", "rate"), [(("target", "draft"), 0.714), (("target",), 0.586)])
def test_top_k_on_one_side_or_both_keeps_the_filtered_law(filters, rate):
    """q = .4 .3 .2 .1; the target's top two are .2857 and .7143."""
    p, q = [2 / 7, 5 / 7, 0, 0], [0.4, 0.3, 0.2, 0.1]
    if "draft" in filters:
        q = [4 / 7, 3 / 7, 0, 0]
    tokens, accepted = emit(rows_of([p, p]), chain(drafted(q), rows_of([q])))
    assert_law(tokens, p)
    assert abs(accepted.mean() - rate) < 0.004


def test_acceptance_is_sure_when_draft_and_target_are_equal_whatever_the_uniform():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(8), (4096, 3)).astype(np.float32)
    tokens = np.stack([rng.choice(8, p=row / row.sum()) for row in p[:, :2].reshape(-1, 8).astype(float)]).reshape(
        -1, 2
    )
    largest = np.nextafter(np.float32(1), np.float32(0))
    draft = chain(tokens, jnp.log(p[:, :2]))
    verdict = decide(Token(), jnp.log(jnp.asarray(p)), draft, jnp.ones((4096, 2), bool), jnp.full((4096, 2), largest))
    assert (verdict.accepted == 2).all()
    np.testing.assert_allclose(verdict.probs, p[:, 2], rtol=1e-5)
    np.testing.assert_allclose(verdict.overlap, 2, rtol=1e-5)


@pytest.mark.parametrize("q", [None, [0.0, 0.5, 0.5]])
def test_a_token_that_the_target_excludes_is_never_accepted_even_when_the_uniform_is_zero(q):
    p = [0.5, 0.0, 0.5]
    draft = chain(np.ones((1, 1)), None if q is None else rows_of([q], 1))
    verdict = decide(Token(), rows_of([p, p], 1), draft, jnp.ones((1, 1), bool), jnp.zeros((1, 1)))
    assert verdict.accepted[0] == 0
    assert verdict.probs[0, 1] == 0
    tokens, accepted = emit(rows_of([p, p]), chain(np.ones((ROWS, 1)), None))
    assert not accepted.any()
    assert (tokens != 1).all()


def test_a_uniform_of_zero_accepts_whatever_the_target_allows():
    p, q = F3
    verdict = decide(
        Token(), rows_of([p, p], 1), chain([[0]], rows_of([q], 1)), jnp.ones((1, 1), bool), jnp.zeros((1, 1))
    )
    assert verdict.accepted[0] == 1


@pytest.mark.parametrize("u, accepted", [(0.19, 1), (0.21, 0)])  # p/q of token 0 in F3 is .2
def test_the_comparison_is_between_u_times_q_and_p(u, accepted):
    p, q = F3
    verdict = decide(
        Token(), rows_of([p, p], 1), chain([[0]], rows_of([q], 1)), jnp.ones((1, 1), bool), jnp.full((1, 1), u)
    )
    assert verdict.accepted[0] == accepted


def one_ulp(p):
    return np.nextafter(np.asarray(p, np.float32), np.float32(2))


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.25] * 4, [0.25] * 4),
        ([0.1, 0.2, 0.3, 0.4], one_ulp([0.1, 0.2, 0.3, 0.4])),
        ([0, 1, 0, 0], [0, 1, 0, 0]),
        ([0, 1, 0, 0], [1, 0, 0, 0]),
        ([1 - 1e-7, 1e-7, 0, 0], [1, 0, 0, 0]),
    ],
    ids=["equal", "one-ulp", "certain", "disjoint", "nearly-certain"],
)
@pytest.mark.parametrize("u", [0.0, 0.5, 1.0])
def test_an_empty_residual_falls_back_to_the_target_and_nothing_is_nan(p, q, u):
    """A uniform of exactly 1 can't be drawn, but rounding may reject where p = q."""
    for token in range(4):
        verdict = decide(
            Token(), rows_of([p, p], 1), chain([[token]], rows_of([q], 1)), jnp.ones((1, 1), bool), jnp.full((1, 1), u)
        )
        law = np.asarray(verdict.probs[0])
        assert np.isfinite(law).all()
        np.testing.assert_allclose(law.sum(), 1, atol=1e-5)
        assert (law[np.asarray(p) == 0] == 0).all()
        if verdict.accepted[0]:
            assert p[token] > 0


def test_a_rejection_at_any_position_draws_from_the_residual_of_that_position():
    """Never from the row before or after, and from p where all were accepted."""
    rng = np.random.default_rng(1)
    k = 3
    p, q = rng.dirichlet(np.ones(5), k + 1), rng.dirichlet(np.ones(5), k)
    tokens = rng.integers(0, 5, k)
    for a in range(k + 1):
        u = np.full(k, 0.0)
        if a < k:  # rejected only if q(x) > p(x): take a token for which it is
            tokens[a] = int(np.argmax(q[a] - p[a]))
            u[a] = 0.999999
        verdict = decide(
            Token(),
            log(p)[None],
            chain(tokens[None], log(q)[None]),
            jnp.ones((1, k), bool),
            jnp.asarray(u[None], jnp.float32),
        )
        assert verdict.accepted[0] == a
        assert verdict.path[0].tolist() == list(range(a)) + [-1] * (k - a)
        assert verdict.tested[0] == min(a + 1, k)
        rest = np.maximum(p[a] - q[a], 0) if a < k else p[k]
        np.testing.assert_allclose(verdict.probs[0], rest / rest.sum(), atol=1e-6)
        overlap = sum(np.minimum(p[i], q[i]).sum() for i in range(min(a + 1, k)))
        np.testing.assert_allclose(verdict.overlap[0], overlap, rtol=1e-5)


def test_a_node_that_is_not_live_is_as_if_never_proposed():
    p, q = F3
    live = jnp.asarray([[True, False, True]])
    draft = chain([[1, 1, 1]], rows_of([q] * 3, 1))
    verdict = decide(Token(), rows_of([p, [0.2, 0.3, 0.5], p, p], 1), draft, live, jnp.zeros((1, 3)))
    assert verdict.accepted[0] == verdict.tested[0] == 1
    np.testing.assert_allclose(verdict.probs[0], [0.2, 0.3, 0.5], rtol=1e-6)  # p after the accepted one, no residual
    tokens, _ = emit(rows_of([p, p]), chain(np.zeros((ROWS, 1)), None))
    assert_law(tokens, p)


def test_a_draft_law_of_nans_rejects_and_emits_a_token_of_the_target():
    p = [0.0, 0.7, 0.3]
    broken = jnp.full((ROWS, 1, 3), jnp.nan)
    draft = chain(np.ones((ROWS, 1)), broken)
    tokens, accepted = emit(rows_of([p, p]), draft)
    assert not accepted.any()
    assert_law(tokens, p)
    verdict = verify.Token().decide(rows_of([p, p]), draft, jnp.ones((ROWS, 1), bool), jnp.zeros((ROWS, 1)))
    np.testing.assert_array_equal(verdict.overlap, 0)  # a count that was NaN could not be stored


def test_an_empty_draft_draws_from_the_target():
    p = F3[0]
    keys = sampling.row_keys(0, range(ROWS))
    verdict = verified(Token(), keys, rows_of([p]), chain(np.zeros((ROWS, 0)), None), jnp.ones((ROWS, 0), bool))
    assert (verdict.accepted == 0).all()
    assert verdict.path.shape == (ROWS, 0)
    assert_law(verdict.bonus, p)


def test_rows_of_a_batch_are_verified_alone():
    rng = np.random.default_rng(2)
    p, q = rng.dirichlet(np.ones(6), (32, 4)), rng.dirichlet(np.ones(6), (32, 3))
    tokens, keys = rng.integers(0, 6, (32, 3)), sampling.row_keys(0, range(32))
    live = jnp.asarray(rng.random((32, 3)) < 0.8)
    verdict = verified(Token(), keys, log(p), chain(tokens, log(q)), live)
    for row in (0, 7, 31):
        part = slice(row, row + 1)
        alone = verified(Token(), keys[part], log(p[part]), chain(tokens[part], log(q[part])), live[part])
        assert (alone.accepted[0], alone.bonus[0]) == (verdict.accepted[row], verdict.bonus[row])
        np.testing.assert_array_equal(alone.path[0], verdict.path[row])


# Siblings: several candidates for the same position.


def test_two_certain_siblings_in_any_order_keep_the_law():
    """Faults: not renormalised .1 .63 .27; never zeroed .163 .378 .459."""
    p = F3[0]
    for order in ([0, 2], [2, 0]):
        draft = chain(np.broadcast_to(order, (ROWS, 2)), None, (-1, -1), 1)
        tokens, accepted = emit(rows_of([p, p, p]), draft)
        assert_law(tokens, p)
        assert abs(accepted.mean() - 0.4) < 0.005


def test_two_independent_siblings_keep_the_law():
    """Fault: the target is not replaced by the residual after the first rejection: .156 .516 .328."""
    p, q = F3
    tokens, accepted = emit(rows_of([p, p, p]), chain(drafted(q, 2), rows_of([q, q]), (-1, -1), 1))
    assert_law(tokens, p)
    assert accepted.mean() > 0.6 + 0.01


def test_siblings_without_replacement_keep_the_law_given_their_conditional_law():
    """Fault: the unconditional q of the second sibling gives .1 .54 .36."""
    p, q = F3
    first = drafted(q)[:, 0]
    rest = jnp.where(jnp.arange(3)[None] == first[:, None], 0, jnp.asarray(q, jnp.float32)[None])
    conditional = jnp.log(rest / rest.sum(-1, keepdims=True))
    keys = sampling.fold(sampling.row_keys(0, range(ROWS)), 17)
    second = drawn(keys, conditional)
    log_q = jnp.stack([rows_of(q), conditional], 1)
    tokens, _ = emit(rows_of([p, p, p]), chain(jnp.stack([first, second], 1), log_q, (-1, -1), 1))
    assert_law(tokens, p)


def test_a_branch_with_more_candidates_is_not_favoured():
    """Root 0 or 4 with one half each; three children below 0, one below 4."""
    p = [0.5, 0, 0, 0, 0.5]
    below = [0.0, 0.3, 0.3, 0.4, 0.0]
    tokens = np.broadcast_to([0, 1, 2, 3, 4, 1], (ROWS, 6))
    draft = chain(tokens, None, (-1, 0, 0, 0, -1, 4), 2)
    emitted, _ = emit(rows_of([p, below, below, below, below, below, below]), draft)
    assert_law(emitted, p)


def test_a_tree_of_width_one_is_the_chain():
    rng = np.random.default_rng(3)
    p, q = rng.dirichlet(np.ones(6), (256, 5)), rng.dirichlet(np.ones(6), (256, 4))
    tokens, live, u = (
        rng.integers(0, 6, (256, 4)),
        jnp.ones((256, 4), bool),
        jnp.asarray(rng.random((256, 4)), jnp.float32),
    )
    one = decide(Token(), log(p), chain(tokens, log(q)), live, u)
    two = decide(Token(), log(p), chain(tokens, log(q), (-1, 0, 1, 2), 4), live, u)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert len(set(np.asarray(one.accepted).tolist())) >= 4


def test_the_second_branch_is_walked_to_its_leaf():
    """Nodes [0] [1] [0,0] [1,0]; the target wants the second."""
    want = np.eye(5)
    log_p = log([want[1], want[4], want[3], want[4], want[2]])[None]  # after: pending, node 0, node 1, node 2, node 3
    draft = chain([[0, 1, 2, 3]], None, (-1, -1, 0, 1), 2)
    verdict = decide(Token(), log_p, draft, jnp.ones((1, 4), bool), jnp.full((1, 4), 0.5))
    assert verdict.path[0].tolist() == [1, 3]
    np.testing.assert_array_equal(verdict.probs[0], want[2])
    assert verdict.tested[0] == 3  # both roots, and the one child of the accepted


@pytest.mark.parametrize(("parents", "depth"), [((-1, -1, -1, -1), 1), ((-1,), 1), ((-1, 0, 1, 2), 4)])
def test_wide_single_and_deep_trees_run(parents, depth):
    nodes = len(parents)
    p = np.full(5, 0.2)
    draft = chain(np.zeros((ROWS, nodes)), None, parents, depth)
    tokens, _ = emit(rows_of([p] * (nodes + 1)), draft)
    assert_law(tokens, p)


def test_only_proven_rules_count_as_exact():
    class Mine(Token):
        """A rule that claims nothing."""

    assert is_exact(Token())
    assert not is_exact(Mine())
