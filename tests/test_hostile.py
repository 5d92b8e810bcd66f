"""Drafters that lie about everything they report, and a text that can be copied."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects

from specjax import LanguageModel, plugins, testing
from specjax.drafter import Drafter
from specjax.engine import Engine
from specjax.state import DraftError
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


@dataclasses.dataclass(frozen=True)
class Misshapen(Drafter):
    """Three point masses, with one field replaced."""

    num_speculative_tokens: int = 3
    fault: str = ""

    def propose(self, keys, params, state, target):
        rows, vocab = target.tokens.shape[0], target.model.vocab_size
        tokens = jnp.zeros((rows, 3), jnp.int32)
        log_q = jnp.full((rows, 3, vocab), -np.log(vocab), jnp.float32)
        draft = Draft(tokens, log_q, target.cache, state)
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.cache)
        spoilt = {
            "log_q of one row": {"log_q": log_q[:1]},
            "log_q of one token": {"log_q": log_q[..., :1]},
            "log_q of a node less": {"log_q": log_q[:, :2]},
            "log_q of a node more": {"log_q": jnp.pad(log_q, ((0, 0), (0, 1), (0, 0)))},
            "log_q without rows": {"log_q": log_q[0]},
            "log_q in bfloat16": {"log_q": log_q.astype(jnp.bfloat16)},
            "log_q in a list": {"log_q": [log_q]},
            "count of one row": {"count": jnp.ones((1,), jnp.int32)},
            "count in float32": {"count": jnp.ones((rows,), jnp.float32)},
            "tokens in float32": {"tokens": tokens.astype(jnp.float32)},
            "tokens without rows": {"tokens": tokens[0]},
            "parents of two nodes": {"parents": jnp.zeros((2,), jnp.int32)},
            "depth that is no number": {"depth": 1.5},
            "cache in bfloat16": {"cache": narrow},
            "cache gone": {"cache": None},
            "state of another tree": {"state": (tokens,)},
        }
        return dataclasses.replace(draft, **spoilt[self.fault]) if self.fault else None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", "Misshapen.propose returned NoneType: return a specjax.Draft"),
        ("log_q of one row", "`log_q` of its draft is float32[1, 3, 29], expected float32[2, 3, 29]"),
        ("log_q of one token", "`log_q` of its draft is float32[2, 3, 1], expected float32[2, 3, 29]"),
        ("log_q of a node less", "`log_q` of its draft is float32[2, 2, 29], expected float32[2, 3, 29]"),
        ("log_q of a node more", "`log_q` of its draft is float32[2, 4, 29], expected float32[2, 3, 29]"),
        ("log_q without rows", "`log_q` of its draft is float32[3, 29], expected float32[2, 3, 29]"),
        ("log_q in bfloat16", "`log_q` of its draft is bfloat16[2, 3, 29], expected float32[2, 3, 29]"),
        ("log_q in a list", "`log_q` of its draft is list, expected float32[2, 3, 29]"),
        ("count of one row", "`count` of its draft is int32[1], expected int32[2]"),
        ("count in float32", "`count` of its draft is float32[2], expected int32[2]"),
        ("tokens in float32", "`tokens` of its draft is float32[2, 3], expected int32[2, 3]"),
        ("tokens without rows", "`tokens` of its draft is int32[3], expected int32[2, N]"),
        ("parents of two nodes", "`parents` of its draft is int32[2], expected int32[3]"),
        ("depth that is no number", "`depth` of its draft is 1.5, expected an int from 0, or None"),
        ("cache in bfloat16", "its target's cache must keep its tree, shapes and dtypes"),
        ("cache gone", "its target's cache must keep its tree, shapes and dtypes"),
        ("state of another tree", "its state must keep its tree, shapes and dtypes"),
    ],
)
def test_a_draft_of_another_form_is_refused_when_it_is_traced(tiny, fault, said):
    engine = Engine(LanguageModel.of(*tiny), Misshapen(fault=fault))
    with pytest.raises(DraftError, match=re.escape(said)):
        engine.generate([[1, 2], [3]], max_new_tokens=4, seed=0)
