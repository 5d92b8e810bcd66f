"""What a round reads, writes and computes: counted by hand, and for any drafter."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from fixtures_memory import SIZES, measured_traffic, nbytes, preset  # noqa: F401

from specjax import mesh
from specjax.drafter import Drafter
from specjax.plugins import load_drafter
from specjax.testing import Tree, tiny_config
from specjax.types import Draft

CONFIG = tiny_config(**SIZES)


def test_a_plain_round_counted_by_hand():
    batch, slots = 2, 64
    found, params, _ = measured_traffic("none", batch, slots)
    embedding = nbytes(params["embed_tokens"])
    row = CONFIG.hidden_size * 2
    assert found.of("verify", "target weights", "read") == nbytes(params) - embedding + batch * row
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 2) - embedding // 2
    assert found.of("verify", "target weights", "flop") == 2 * batch * matrices
    token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert found.of("verify", "target KV", "read") == batch * slots * token
    assert found.of("verify", "window write", "written") == batch * token
    attention = 2 * 2 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * batch * slots
    assert found.of("verify", "target KV", "flop") == attention
    assert found.memory_bytes("draft") < 100  # keys of the rows, at most
    assert found.bytes("verify", "tree commit") == found.bytes("verify", "rollback") == 0


def test_an_n_gram_reads_no_weights_and_a_window_of_k_reads_the_targets_once():
    found, _, _ = measured_traffic("ngram")
    plain, _, _ = measured_traffic("none")
    assert found.of("draft", "target weights", "read") == found.of("draft", "drafter weights", "read") == 0
    extra = found.of("verify", "target weights", "read") - plain.of("verify", "target weights", "read")
    assert extra == 2 * 7 * CONFIG.hidden_size * 2  # the window's rows of the embedding
    assert found.flop("verify") == 8 * plain.flop("verify")
    assert found.of("verify", "window write", "written") == 8 * plain.of("verify", "window write", "written")
    assert found.intensity("verify") > 2 * plain.intensity("verify")


def test_each_step_of_a_chain_reads_its_weights_again():
    window = 3
    settings = {"num_speculative_tokens": str(window)}
    plain = measured_traffic("none")[0]

    exit_, params, _ = measured_traffic(load_drafter("early-exit", settings | {"exit_layer": "1"}))
    layers = nbytes(params["layers"]) / CONFIG.num_layers
    head = nbytes(params["lm_head"]) + nbytes(params["norm"])
    assert exit_.of("draft", "target weights", "read") == window * (layers + head + 2 * CONFIG.hidden_size * 2)
    assert exit_.of("draft", "target KV", "read") * 3 == window * plain.of("verify", "target KV", "read")

    fp8, _, own = measured_traffic(load_drafter("fp8", settings))
    assert fp8.of("draft", "drafter weights", "read") == window * nbytes(own)
    assert fp8.of("draft", "drafter KV", "read") == 0

    external, _, own = measured_traffic(load_drafter("external", settings | {"keep_layers": "2"}))
    embedding = nbytes(own["embed_tokens"])
    fed = 2 * 2 * CONFIG.hidden_size * 2  # two tokens a row are fed again, each step
    assert external.of("draft", "drafter weights", "read") == window * (nbytes(own) - embedding + fed)
    assert external.of("draft", "target weights", "read") == 0
    assert external.of("draft", "drafter KV", "read") * 3 == 2 * window * plain.of("verify", "target KV", "read")


def test_laws_are_counted_once_each_way():
    batch, window, vocab = 2, 3, CONFIG.vocab_size
    found, _, _ = measured_traffic(load_drafter("external", {"num_speculative_tokens": "3"}))
    law = batch * vocab * 4
    assert found.of("draft", "probability buffers", "written") == 2 * window * law  # logits, and the law drawn from
    assert found.of("verify", "probability buffers", "read") == window * law + 2 * (window + 1) * law
    assert measured_traffic("ngram")[0].of("draft", "probability buffers", "written") == 0


def test_a_tree_pays_for_its_commit_and_a_chain_does_not():
    parents = (-1, -1, 0, 0, 1)
    found, _, _ = measured_traffic(Tree(parents=parents))
    token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    moved = found.of("verify", "tree commit", "read")
    assert moved == found.of("verify", "tree commit", "written")
    assert 0 < moved <= 2 * len(parents) * token
    assert measured_traffic("external")[0].bytes("verify", "tree commit") == 0


@dataclass(frozen=True)
class Twice(Drafter):
    """A researcher's own: reads one matrix three times a round, and a table by rows."""

    def params(self, key, model, target_params):
        return {"matrix": jnp.zeros((8, 16)), "table": jnp.zeros((1000, 8))}

    def propose(self, keys, params, state, target):
        x = params["table"][target.tokens[:, 0]] @ params["matrix"][:, :8]
        x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params["matrix"] @ params["matrix"].T), x)
        tokens = jnp.zeros((x.shape[0], self.num_speculative_tokens), jnp.int32) + x.sum().astype(jnp.int32)
        return Draft(tokens, None, target.cache, state, jnp.zeros_like(target.length))


def test_a_drafter_of_ones_own_needs_no_code_for_its_traffic():
    found, _, _ = measured_traffic(Twice(2))
    matrix, rows = 8 * 16 * 4, 2 * 8 * 4
    assert found.of("draft", "drafter weights", "read") == rows + matrix // 2 + 3 * 2 * matrix
    assert found.of("draft", "drafter weights", "flop") == 2 * 2 * 8 * 8 + 3 * 2 * 2 * 2 * 8 * 16


def test_a_mesh_splits_what_is_read_and_adds_two_sums_a_layer():
    whole = measured_traffic("none", num_kv_heads=4, vocab_size=64)[0]
    layout = mesh.split(4, 4)
    split = measured_traffic("none", num_kv_heads=4, vocab_size=64, layout=layout)[0]
    assert split.of("verify", "target KV", "read") * 4 == whole.of("verify", "target KV", "read")
    assert split.flop("verify") * 4 == whole.flop("verify")
    norms = 7 * CONFIG.hidden_size * 2  # on every device
    rows = 2 * CONFIG.hidden_size * 2
    weights = whole.of("verify", "target weights", "read") - norms - rows
    assert split.of("verify", "target weights", "read") == weights // 4 + norms + rows
    result = 2 * CONFIG.hidden_size * 2
    assert split.bytes("verify", "exchange") == 2 * CONFIG.num_layers * result * 2 * 3 // 4
    assert whole.bytes("verify", "exchange") == 0


@pytest.mark.parametrize(("backend", "factor"), [("cpu", 1), ("gpu", 0)])
def test_a_cpu_writes_and_reads_weights_that_it_converts(backend, factor):
    found, _, own = measured_traffic(
        load_drafter("fp8", {"num_speculative_tokens": "3"}), backend=backend, dtype=jnp.float32
    )
    matrices = sum(leaf.size for leaf in jax.tree.leaves(own) if leaf.ndim == 2)
    assert found.of("draft", "converted weights", "written") == factor * 3 * matrices * 4
