"""Block verification: its law and its rate by enumeration, its counts, and the forms of it that are wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.experiments import error_rates

from specjax import decode, sampling, testing
from specjax.evaluate import metrics
from specjax.exactness import gate, identity
from specjax.exactness.mutants.blocks import Hierarchical, LastRatioUncapped
from specjax.exactness.subjects import dirichlet_laws, table_subject
from specjax.types import Cache, Counts, Draft, Prompts
from specjax.verify import Block, Lenient, Match, NotAChainError, Token, Typical, is_exact

SIZES = [(2, 1, 0), (2, 3, 1), (3, 2, 5), (4, 2, 5), (3, 3, 7)]


def enumerated(rule, size, **options):
    vocab, length, seed = size
    target, draft = dirichlet_laws(vocab, length + 1, seed)
    return gate.law_of(rule, target.__getitem__, gate.chain(length, draft.__getitem__, **options), vocab)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_keeps_the_joint_law_and_accepts_what_the_closed_form_says(size, certain):
    vocab, length, seed = size
    target, draft = dirichlet_laws(vocab, length + 1, seed)
    joint, accepted = enumerated(Block(), size, certain=certain)
    np.testing.assert_allclose(joint, gate.target_joint(target.__getitem__, vocab, length + 1), atol=1e-12)
    theory = error_rates.accepted_in_theory(target, draft, length)
    assert accepted == pytest.approx(theory["match" if certain else "block"], abs=1e-11)


def test_the_law_and_the_gate_hold_in_float32():
    target, draft = dirichlet_laws(3, 4, seed=7)
    difference = identity.difference(Block(), gate.chain(3, draft.__getitem__), target.__getitem__, "float32")
    assert max(difference) < gate.TOLERANCE["float32"]
    assert is_exact(Block())
    assert not is_exact(Hierarchical())  # it is, but nobody has put it on the list


def test_the_published_example_accepts_11_ninths_of_a_token():
    p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
    found = {rule: gate.law_of(rule, lambda c: p, gate.chain(2, lambda c: q), 2)[1] for rule in (Token(), Block())}
    assert found == pytest.approx({Token(): 10 / 9, Block(): 11 / 9})  # Sun et al. 2024, figure 1


@pytest.mark.parametrize("seed", range(8))
def test_it_never_accepts_less_than_token_on_the_same_drafts_in_any_context(seed):
    for vocab, length in ((2, 3), (3, 2)):
        target, draft = dirichlet_laws(vocab, length + 2, seed)
        for first in range(vocab):  # each context's own laws
            p, q = (lambda context, laws=laws, first=first: laws[first, *context] for laws in (target, draft))
            token, block = (gate.law_of(rule, p, gate.chain(length, q), vocab)[1] for rule in (Token(), Block()))
            assert block >= token - 1e-11


def drafts(target, draft, length, rows, seed=0):
    """Chains drawn from `draft`, with the laws of both along each."""
    generator = np.random.default_rng(seed)
    paths = np.array(list(itertools.product(range(len(target[()])), repeat=length)))
    chance = np.array([np.prod([draft[tuple(path[:i])][path[i]] for i in range(length)]) for path in paths])
    tokens = paths[generator.choice(len(paths), rows, p=chance / chance.sum())].astype(np.int32)
    laws = lambda table, depth: np.log([[table[tuple(map(int, row[:i]))] for i in range(depth)] for row in tokens])  # noqa: E731
    log_p, log_q = (jnp.asarray(laws(*part), jnp.float32) for part in ((target, length + 1), (draft, length)))
    return log_p, Draft(jnp.asarray(tokens), log_q, Cache(()), ())


@pytest.fixture(scope="module")
def window():
    target, draft = dirichlet_laws(3, 4, seed=7)
    return target, draft, *drafts(target, draft, 3, 20_000)


def verified(rule, window, live, seed=0):
    _, _, log_p, draft = window
    keys = sampling.row_keys(seed, range(len(live)))
    return jax.device_get(jax.jit(rule.verify)(keys, log_p, draft, jnp.asarray(live)))


def test_on_samples_it_accepts_more_than_token_and_each_as_many_as_its_overlap(window):
    live = np.ones((20_000, 3), bool)
    token, block = (verified(rule, window, live) for rule in (Token(), Block()))
    gain = block.accepted - token.accepted
    assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))
    for verdict in (token, block):
        surplus = verdict.accepted - verdict.overlap
        assert abs(surplus.mean()) < 4 * surplus.std() / np.sqrt(len(surplus))
    theory = error_rates.accepted_in_theory(*window[:2], drafts=3)
    assert abs(block.accepted.mean() - theory["block"]) < 4 * block.accepted.std() / np.sqrt(len(gain))


def test_rates_by_position_are_those_of_the_prefix_weights(window):
    """At least i drafts are accepted with probability E w_i, of the rounds that drafted as many."""
    target, draft, *_ = window
    live = np.arange(3)[None] < np.random.default_rng(1).integers(0, 4, (20_000, 1))
    verdict = verified(Block(), window, live)
    counts = Counts(live.sum(1), verdict.tested, verdict.accepted, verdict.accepted + 1, verdict.overlap, live[:, 0])
    conditional, marginal = metrics.rates_by_position([counts])
    shorter = [error_rates.accepted_in_theory(target, draft, drafts=i)["block"] for i in range(4)]
    expected = np.diff(shorter)  # of each position: one more draft adds E w of the longer prefix
    np.testing.assert_allclose(marginal, expected, atol=0.02)
    assert (verdict.tested == np.minimum(verdict.accepted + 1, live.sum(1))).all()
    reached = [(live.sum(1) > i) & (verdict.accepted >= i) for i in range(3)]
    np.testing.assert_allclose(conditional, [np.mean(verdict.accepted[rows] > i) for i, rows in enumerate(reached)])


def test_a_chain_ends_at_its_first_dead_node(window):
    _, _, log_p, draft = window
    log_p, tokens, log_q = log_p[:512], draft.tokens[:512], draft.log_q[:512]
    u = jnp.asarray(np.random.default_rng(2).random((512, 3)), jnp.float32)
    short = Draft(tokens[:, :1], log_q[:, :1], Cache(()), ())
    alone = Block().decide(log_p[:, :2], short, jnp.ones((512, 1), bool), u[:, :1])
    live = jnp.broadcast_to(jnp.asarray([[True, False, True]]), (512, 3))
    nans = log_q.at[:, 1].set(jnp.nan)
    for whole, alive in ((log_q, live), (nans, live | True)):
        verdict = Block().decide(log_p, Draft(tokens, whole, Cache(()), ()), alive, u)
        for name in ("accepted", "tested", "probs", "overlap"):
            np.testing.assert_allclose(getattr(verdict, name), getattr(alone, name), rtol=1e-6)


def test_a_single_draft_and_a_greedy_window_are_verified_as_token_does(window):
    _, _, log_p, draft = window
    u = jnp.asarray(np.random.default_rng(3).random((20_000, 3)), jnp.float32)
    one = Draft(draft.tokens[:, :1], draft.log_q[:, :1], Cache(()), ())
    greedy = jnp.where(log_p == log_p.max(-1, keepdims=True), 0, -jnp.inf)
    for laws, chain in ((log_p[:, :2], one), (greedy, Draft(draft.tokens, None, Cache(()), ()))):
        live, v = jnp.ones(chain.tokens.shape, bool), u[:, : chain.tokens.shape[1]]
        token, block = (rule.decide(laws, chain, live, v) for rule in (Token(), Block()))
        for name in ("path", "accepted", "tested", "probs"):
            np.testing.assert_array_equal(getattr(block, name), getattr(token, name), err_msg=name)
        np.testing.assert_allclose(block.overlap.mean(), token.overlap.mean(), rtol=1e-5)


@pytest.mark.parametrize("q", [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0], None], ids=str)
@pytest.mark.parametrize("p", [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], ids=str)
def test_zeros_on_either_side_make_no_nan_and_nothing_impossible(p, q):
    log = lambda law, rows: jnp.broadcast_to(jnp.log(jnp.asarray(law, jnp.float32)), (8, rows, 3))  # noqa: E731
    tokens = jnp.asarray(list(itertools.product((0, 1), repeat=3)), jnp.int32)
    draft = Draft(tokens, None if q is None else log(q, 3), Cache(()), ())
    for u in (0.0, 0.5, 0.999999):
        verdict = Block().decide(log(p, 4), draft, jnp.ones((8, 3), bool), jnp.full((8, 3), u))
        assert np.isfinite(verdict.probs).all()
        assert np.isfinite(verdict.overlap).all()
        np.testing.assert_allclose(verdict.probs.sum(-1), 1, rtol=1e-6)
        assert (np.asarray(verdict.probs)[:, np.asarray(p) == 0] == 0).all()
        for row, accepted in zip(np.asarray(tokens), np.asarray(verdict.accepted), strict=True):
            assert all(p[token] > 0 for token in row[:accepted])


@pytest.mark.parametrize("rule", [Token(), Match(), Block(), Typical(), Lenient()], ids=str)
def test_an_equal_drafter_is_accepted_wholly_and_an_empty_draft_not_at_all(rule):
    p = np.random.default_rng(4).dirichlet(np.ones(64), (256, 5)).astype(np.float32)
    best = jnp.asarray(p[:, :4].argmax(-1), jnp.int32)
    log_p, keys = jnp.log(jnp.asarray(p)), sampling.row_keys(0, range(256))
    if type(rule) in (Token, Block):
        verdict = rule.verify(keys, log_p, Draft(best, log_p[:, :4], Cache(()), ()), jnp.ones((256, 4), bool))
        assert (verdict.accepted == 4).all()
    verdict = rule.verify(keys, log_p[:, :1], Draft(best[:, :0], None, Cache(()), ()), jnp.ones((256, 0), bool))
    assert (verdict.accepted == 0).all()
    assert ((verdict.bonus >= 0) & (verdict.bonus < 64)).all()


def test_a_tree_is_refused_when_the_round_is_traced():
    subject = table_subject(3, 3, 5)
    program = decode.Program(subject.model, testing.Tree(), Block())
    with pytest.raises(NotAChainError, match="use the rule `token`"):
        jax.eval_shape(lambda: _one_round(program, subject.params))


def _one_round(program, params):
    tokens, length = jnp.zeros((2, 16), jnp.int32), jnp.full((2,), 2, jnp.int32)
    keys, ends = sampling.row_keys(0, range(2)), jnp.full((1,), -1, jnp.int32)
    prompts = Prompts(tokens, length, length + 9, keys, ends, sampling.make_sampling(2))
    state = decode.start(program, params, (), prompts, jnp.float32)
    return decode.decode_round(program, params, (), state)


# Forms of it that are not in the product.


def stops(rule, target, draft, length):
    """For each draft and each place to stop at: its probability, and the law of the bonus token."""
    paths = np.array(list(itertools.product(range(len(target[()])), repeat=length)), np.int32)
    rows = lambda laws, depth: [[laws[tuple(path[:i])] for i in range(depth)] for path in paths]  # noqa: E731
    with jax.enable_x64(True):
        log_p, log_q = (jnp.log(jnp.asarray(rows(*part))) for part in ((target, length + 1), (draft, length)))
        whole = Draft(jnp.asarray(paths), log_q, Cache(()), ())

        @jax.jit
        def decide(u):
            verdict = rule.decide(log_p, whole, jnp.ones(paths.shape, bool), u)
            return verdict.path, verdict.accepted, verdict.probs

        found = []
        for pattern in itertools.product((False, True), repeat=length):
            wanted = np.broadcast_to(pattern, paths.shape)
            run = lambda u: jax.device_get(decide(jnp.asarray(u)))  # noqa: E731
            chance, (_, accepted, law), _ = gate._patterns(run, wanted, "float64")
            found.append((chance, accepted, law))
    probability = np.zeros((length + 1, len(paths)))
    laws = np.zeros((length + 1, len(paths), len(target[()])))
    for chance, accepted, law in found:
        for row in range(len(paths)):
            probability[accepted[row], row] += chance[row]
            laws[accepted[row], row] += chance[row] * law[row]
    return probability, laws


@pytest.mark.parametrize("size", [(2, 3, 1), (3, 2, 5), (3, 3, 7)], ids=str)
def test_hierarchical_verification_is_block_verification_path_by_path(size):
    vocab, length, seed = size
    one, other = (stops(rule, *dirichlet_laws(vocab, length + 1, seed), length) for rule in (Block(), Hierarchical()))
    np.testing.assert_allclose(one[0], other[0], atol=1e-12)
    np.testing.assert_allclose(one[1], other[1], atol=1e-12)


def test_a_last_ratio_left_uncapped_breaks_the_law():
    wrong, _ = enumerated(LastRatioUncapped(), (3, 3, 7))
    right = gate.target_joint(dirichlet_laws(3, 4, seed=7)[0].__getitem__, 3, 4)
    assert wrong.sum() == pytest.approx(1)
    np.testing.assert_allclose(wrong.sum((1, 2, 3)), right.sum((1, 2, 3)), atol=1e-12)  # a marginal sees nothing
    assert 0.5 * np.abs(wrong - right).sum() > 0.01
