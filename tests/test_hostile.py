"""Drafters that lie about everything they report, and a text that can be copied."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects

from specjax import plugins, testing
from specjax.drafter import Drafter
from specjax.types import Draft

IDS = 7
NEW = 20
PROMPTS = [[1], [2, 3], [4, 5, 6, 1, 2], [0, 0, 0]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    subjects.compile_quickly(monkeypatch)


@dataclasses.dataclass(frozen=True)
class Liar(Drafter):
    """Counts below zero and beyond the draft, ids out of range, cycles, children before parents, laws of nonsense."""

    num_speculative_tokens: int = 6
    depth: int = 2

    def propose(self, keys, params, state, target):
        nodes, law = self.num_speculative_tokens, [np.nan, np.inf, -np.inf, 0.0, -1.0, 3.0, -50.0]

        def lie(key, length):
            one, two, three, four = jax.random.split(jax.random.fold_in(key, length), 4)
            tokens = jax.random.choice(
                one, jnp.asarray([*range(IDS + 1), -1, 2**31 - 1, -(2**31)], jnp.int32), (nodes,)
            )
            parents = jax.random.randint(two, (nodes,), -3, nodes + 3, jnp.int32)
            parents = jnp.where(
                jnp.arange(nodes) < 3, jnp.arange(nodes, dtype=jnp.int32) - 1, parents
            )  # some are right
            count = jax.random.randint(four, (), -3, nodes + 4, jnp.int32)
            return tokens, jax.random.choice(three, jnp.asarray(law, jnp.float32), (nodes, IDS)), count, parents

        tokens, log_q, count, parents = jax.vmap(lie)(keys, target.length)
        return Draft(tokens, log_q, target.cache, state, count, parents, self.depth)


@pytest.mark.parametrize("depth", [0, 2, 9])
def test_a_drafter_that_lies_about_everything_changes_no_greedy_text(depth):
    """At temperature 0 a rejected token leaves the target's own choice, whatever the drafter says it drew from."""
    laws = np.random.default_rng(0).dirichlet(np.full(IDS, 0.3), (IDS + 1, IDS + 1))
    model, params = testing.TableModel(IDS), testing.table_params(laws)
    rows = subjects.run_rows(model, params, Liar(depth=depth), (), PROMPTS, NEW, capacity=32)
    accepted = 0
    for prompt, text, counts in zip(PROMPTS, rows.tokens, rows.counts, strict=True):
        whole = [IDS, *prompt]
        for _ in range(NEW):
            whole.append(int(np.argmax(laws[whole[-2], whole[-1]])))
        assert text == whole[-NEW:]
        assert counts["emitted"].sum() == NEW - 1
        assert np.isfinite(counts["overlap"]).all()
        accepted += counts["accepted"].sum()
    assert (accepted > 0) == (depth > 0)


def test_a_text_that_repeats_is_copied_many_tokens_a_round():
    laws = np.broadcast_to(np.roll(np.eye(IDS), 1, 1)[None], (IDS + 1, IDS, IDS))  # after i comes i + 1
    laws = np.concatenate([laws, np.full((IDS + 1, 1, IDS), 1 / IDS)], 1)
    model, params = testing.TableModel(IDS), testing.table_params(laws)
    ngram = plugins.load_drafter("ngram", {"num_speculative_tokens": "4"})
    rows = subjects.run_rows(model, params, ngram, (), [[0, 1, 2, 3, 4, 5, 6, 0]], NEW + 1, capacity=32)
    assert rows.tokens == [[(1 + i) % IDS for i in range(NEW + 1)]]
    assert rows.counts[0]["emitted"].tolist() == [5, 5, 5, 5]  # of the first token's twenty followers
