"""Block verification, the hierarchical form that equals it, and the one that does not keep the law: by enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.exactness.block import block

from specjax.exactness import gate
from specjax.exactness.subjects import dirichlet_laws
from specjax.types import Draft


def stops(target, draft, length, **options):
    """Every draft's probability, and for each place to stop at its probability and the law of the further token."""
    vocab = len(target[()])
    paths = np.array(list(itertools.product(range(vocab), repeat=length)), np.int32)
    rows = lambda laws, depth: [[laws[tuple(path[:i])] for i in range(depth)] for path in paths]  # noqa: E731
    chance = np.array([np.prod([draft[tuple(path[:i])][path[i]] for i in range(length)]) for path in paths])
    with jax.enable_x64(True):
        log_p, log_q = (jnp.log(jnp.asarray(rows(*part))) for part in ((target, length + 1), (draft, length)))
        whole = Draft(jnp.asarray(paths), log_q, jnp.full((len(paths),), length, jnp.int32), (), ())
        live = jnp.ones(paths.shape, bool)
        verify_block = jax.jit(lambda u: block(log_p, whole, live, u, **options))

        def accepts(i, u):
            return np.asarray(verify_block(jnp.ones(paths.shape).at[:, i].set(u))[0]) == i + 1

        thresholds = np.zeros(paths.shape)
        for i in range(length):
            low, high = np.zeros(len(paths)), np.ones(len(paths))
            for _ in range(50):
                inside = accepts(i, (low + high) / 2)
                low, high = np.where(inside, (low + high) / 2, low), np.where(inside, high, (low + high) / 2)
            thresholds[:, i] = low
        probability, laws = [], []
        for stop in range(length + 1):  # the largest success wins
            reach = thresholds[:, stop - 1] if stop else 1.0
            probability.append(reach * np.prod(1 - thresholds[:, stop:], 1))
            u = np.where(np.arange(length)[None] == stop - 1, 0.0, 1.0 - 1e-12) * np.ones(paths.shape)
            laws.append(np.asarray(verify_block(jnp.asarray(u))[1]))
    return paths, chance, np.array(probability), np.array(laws)


def law_of_block(target, draft, length, **options):
    paths, chance, probability, laws = stops(target, draft, length, **options)
    vocab = len(target[()])
    joint = np.zeros((vocab,) * (length + 1))
    for row, path in enumerate(paths):
        for stop in range(length + 1):
            for token in range(vocab):
                prefix = (*map(int, path[:stop]), token)
                rest = gate.target_joint(target.__getitem__, vocab, length - stop, prefix)
                joint[prefix] += chance[row] * probability[stop, row] * laws[stop, row, token] * rest
    return joint


def test_hierarchical_verification_is_block_verification_path_by_path():
    for vocab, length, seed in ((2, 3, 1), (3, 2, 5), (3, 3, 7)):
        target, draft = dirichlet_laws(vocab, length + 1, seed)
        _, _, one, one_law = stops(target, draft, length)
        _, _, other, other_law = stops(target, draft, length, hierarchical=True)
        np.testing.assert_allclose(one, other, atol=1e-12)
        reached = one > 0
        np.testing.assert_allclose(one_law[reached], other_law[reached], atol=1e-12)
        expected = gate.target_joint(target.__getitem__, vocab, length + 1)
        np.testing.assert_allclose(law_of_block(target, draft, length), expected, atol=1e-12)


def test_a_last_ratio_left_uncapped_breaks_the_law():
    target, draft = dirichlet_laws(3, 4, seed=7)
    wrong, right = law_of_block(target, draft, 3, uncapped=True), gate.target_joint(target.__getitem__, 3, 4)
    assert wrong.sum() == pytest.approx(1)
    np.testing.assert_allclose(wrong.sum((1, 2, 3)), right.sum((1, 2, 3)), atol=1e-12)  # a marginal sees nothing
    assert 0.5 * np.abs(wrong - right).sum() > 0.01
