"""Trees of drafts through the whole loop: the accepted path is committed, its neighbours leave no trace."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects
from subjects import CAPACITY, run_rows

from specjax import testing
from specjax.drafter import Drafter
from specjax.state import lay_out
from specjax.types import Draft


@dataclasses.dataclass(frozen=True)
class TreeOracle(Drafter):
    """Point masses on a tree: right along `path[b]`, wrong and all different elsewhere.

    `params` is `{"tokens": [B, T], "parents": [N] or [B, N], "right": [B, N]}`: a row's greedy text, the tree, and
    which nodes hold the text's token at their depth.
    """

    depth: int = 2
    taps: tuple[int, ...] = ()

    def tapped_layers(self, model):
        return self.taps

    def init(self, params, model, batch, capacity, dtype):
        return {
            "tokens": jnp.full((batch, capacity), -1, jnp.int32),
            "hidden": tuple(jnp.zeros((batch, 1, capacity, model.hidden_size), dtype) for _ in self.taps),
        }

    def observe(self, params, state, seen):
        """Everything that was shown, where it belongs; what is not real must not be."""
        steps = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)[None]
        real = steps < seen.count[:, None]
        index = jnp.where(real, seen.start[:, None] + steps, state["tokens"].shape[1])
        row = jnp.arange(len(seen.tokens), dtype=jnp.int32)[:, None]
        return {
            "tokens": state["tokens"].at[row, index].set(seen.tokens, mode="drop"),
            "hidden": tuple(
                slots.at[row, 0, index].set(new, mode="drop")
                for slots, new in zip(state["hidden"], seen.hidden, strict=True)
            ),
        }

    def propose(self, keys, params, state, target):
        rows, nodes = params["right"].shape
        parents = jnp.broadcast_to(params["parents"], (rows, nodes))
        depth = jnp.zeros((rows, nodes), jnp.int32)
        for node in range(nodes):
            above = jnp.take_along_axis(depth, jnp.maximum(parents[:, node], 0)[:, None], 1)[:, 0]
            depth = depth.at[:, node].set(jnp.where(parents[:, node] >= 0, above + 1, 0))
        index = jnp.minimum(target.length[:, None] + depth, params["tokens"].shape[1] - 1)
        text = jnp.take_along_axis(params["tokens"], index, 1)
        wrong = (text + 1 + jnp.arange(nodes, dtype=jnp.int32)[None]) % target.model.vocab_size
        tokens = jnp.where(params["right"], text, wrong)
        return Draft(tokens, None, target.cache, state, parents=params["parents"], depth=self.depth)


def script(texts, parents, right):
    whole = np.stack([np.pad(p + t, (0, CAPACITY - len(p + t))) for p, t in texts])
    return {
        "tokens": jnp.asarray(whole, jnp.int32), "parents": jnp.asarray(parents, jnp.int32),
        "right": jnp.asarray(right, bool),
    }  # fmt: skip


TREE = (-1, -1, 0, 1)  # [0] [1] [0,0] [1,0]
BRANCHES = [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 0]]  # the second branch, the first, half of the second


@pytest.fixture(scope="module")
def finished(tiny, greedy_texts):
    """Twenty tokens through TREE, with taps of layers 1 and 3."""
    texts = [greedy_texts[i] for i in (1, 4, 8)]
    drafter = TreeOracle(4, taps=(1, 3))
    rows = subjects.run_rows(*tiny, drafter, script(texts, TREE, BRANCHES), [prompt for prompt, _ in texts], 20)
    return texts, rows


def test_the_accepted_branch_is_emitted_whichever_it_is(finished):
    texts, rows = finished
    assert rows.tokens == [text[:20] for _, text in texts]
    assert rows.counts[0]["accepted"].tolist() == rows.counts[1]["accepted"].tolist() == [2] * 6 + [0]  # 6 x 3 + 1
    assert rows.counts[2]["accepted"].tolist() == [1] * 9 + [0]


def test_the_cache_and_what_was_observed_along_the_accepted_branch_equal_a_clean_pass(finished, tiny):
    model, params = tiny
    _, rows = finished
    state, seen = rows.state, rows.state.drafter
    cache = model.init_cache(3, CAPACITY, jnp.float32)
    clean = jax.jit(lambda t, c: model.forward(params, t, c, jnp.zeros(3, jnp.int32), taps=(1, 3)))
    out = clean(state.tokens, cache)
    committed = np.arange(CAPACITY)[None] < np.asarray(state.length)[:, None] - 1
    np.testing.assert_array_equal(seen["tokens"], np.where(committed, state.tokens, -1))  # all of it, and nothing else
    real = committed[:, None, :, None]
    want = jax.tree.leaves((out.cache, tuple(tap[:, None] for tap in out.taps)))
    for got, expected in zip(jax.tree.leaves((state.cache, seen["hidden"])), want, strict=True):
        np.testing.assert_allclose(np.where(real, got, 0), np.where(real, expected, 0), rtol=1e-4, atol=2e-4)
    assert len(seen["hidden"]) == 2


def test_each_row_may_have_a_tree_of_its_own(tiny, greedy_texts):
    texts = [greedy_texts[i] for i in (1, 4, 8)]
    parents = [[-1, -1, 0, 1], [-1, 0, 1, 2], [-1, -1, -1, 2]]
    right = [[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1]]
    rows = run_rows(*tiny, TreeOracle(4, depth=4), script(texts, parents, right), [p for p, _ in texts], 20)
    assert rows.tokens == [text[:20] for _, text in texts]
    assert [counts["accepted"].max() for counts in rows.counts] == [2, 3, 2]


@pytest.mark.parametrize(
    ("parents", "right", "depth", "accepted"),
    [
        ([-1, -1, -1, -1], [0, 0, 0, 1], 1, 1),
        ([-1], [1], 1, 1),
        ([-1, 0, 1, 2], [1, 1, 1, 1], 4, 4),
        ([], [], 0, 0),
    ],
    ids=["one-deep-four-wide", "single", "one-wide-four-deep", "empty"],
)
def test_trees_of_extreme_shape_give_the_plain_text(tiny, greedy_texts, parents, right, depth, accepted):
    texts = [greedy_texts[i] for i in (0, 3, 6)]
    params = script(texts, np.reshape(parents, -1), np.broadcast_to(np.reshape(right, -1), (3, len(right))))
    for new in (1, 2, 20):
        rows = run_rows(*tiny, TreeOracle(max(1, len(parents)), depth=depth), params, [p for p, _ in texts], new)
        assert rows.tokens == [text[:new] for _, text in texts]
    assert rows.counts[0]["accepted"].max() == accepted


def test_a_tree_of_width_one_samples_the_very_tokens_of_a_chain(tiny):
    tree = testing.Tree(parents=(-1, 0, 1))

    class Chain(testing.Tree):
        """The same tokens and laws, declared as a chain."""

        def propose(self, keys, params, state, target):
            return dataclasses.replace(super().propose(keys, params, state, target), parents=None)

    prompts = [[1], [2, 3], [4, 5, 6]]
    one = run_rows(*tiny, tree, (), prompts, 20, temperature=1.0)
    two = run_rows(*tiny, Chain(parents=(-1, 0, 1)), (), prompts, 20, temperature=1.0)
    assert one.tokens == two.tokens
    assert any(counts["accepted"].any() for counts in one.counts)


def test_a_tree_that_does_not_fit_the_end_of_the_cache_is_cut_and_clobbers_nothing(tiny, greedy_texts):
    texts = [greedy_texts[i] for i in (1, 4, 8)]
    prompts = [p for p, _ in texts]
    new = [CAPACITY - len(prompt) for prompt in prompts]
    plain = run_rows(*tiny, testing.Silent(1), (), prompts, new)
    long = [(p, t) for p, t in zip(prompts, plain.tokens, strict=True)]
    rows = run_rows(*tiny, TreeOracle(4), script(long, TREE, BRANCHES), prompts, new)
    assert rows.tokens == plain.tokens


def test_nodes_of_a_tree_beyond_the_end_of_the_cache_are_not_live():
    """The budget would allow them: only the capacity ends them."""
    state = types.SimpleNamespace(
        tokens=jnp.zeros((3, 8), jnp.int32),
        length=jnp.array([6, 5, 7], jnp.int32),
        limit=jnp.full((3,), 99, jnp.int32),
        done=jnp.zeros((3,), bool),
    )
    parents = jnp.array([-1, -1, 0, 1], jnp.int32)
    draft = Draft(jnp.ones((3, 4), jnp.int32), None, None, (), parents=parents)
    window = lay_out(state, draft, 29)
    assert window.live.tolist() == [[True, True, False, False], [True, True, True, False], [True, False, False, False]]
    assert window.cut.tolist() == [True, True, True]


def test_finished_rows_keep_their_slots_while_a_tree_goes_on(tiny, greedy_texts):
    texts = [greedy_texts[i] for i in (1, 4, 8)]
    rows = run_rows(*tiny, TreeOracle(4), script(texts, TREE, BRANCHES), [p for p, _ in texts], [2, 30, 5])
    assert rows.tokens == [texts[0][1][:2], texts[1][1][:30], texts[2][1][:5]]
