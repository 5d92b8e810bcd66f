"""Writes that stay where they belong, and the commit of a tree's accepted path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import subjects

from specjax import cache as kv
from specjax.drafter import Nothing
from specjax.types import Cache


def filled(batch=2, heads=2, slots=8, width=3):
    return jnp.arange(batch * heads * slots * width, dtype=jnp.float32).reshape(batch, heads, slots, width) + 1


@pytest.mark.parametrize(("start", "kept"), [(7, 7), (6, 6), (5, 5), (8, 8), (50, 8)])
def test_a_write_past_the_end_is_dropped_and_never_moved_back(start, kept):
    """`dynamic_update_slice` would clamp the start and overwrite committed slots."""
    before = filled()
    after = kv.write(before, -jnp.ones((2, 2, 3, 3)), jnp.full(2, start))
    np.testing.assert_array_equal(after[:, :, :kept], before[:, :, :kept])
    np.testing.assert_array_equal(after[:, :, kept:], -1)


@pytest.mark.parametrize("start", [-1, -2, -9])
def test_a_write_before_the_beginning_is_dropped_and_never_wraps(start):
    before = filled()
    after = kv.write(before, -jnp.ones((2, 2, 3, 3)), jnp.full(2, start))
    written = max(0, 3 + start)
    np.testing.assert_array_equal(after[:, :, :written], -1)
    np.testing.assert_array_equal(after[:, :, written:], before[:, :, written:])


def test_each_row_is_written_at_its_own_start():
    rows = jnp.stack([jnp.full((2, 3, 3), 100.0), jnp.full((2, 3, 3), 200.0)])
    after = np.asarray(kv.write(filled(), rows, jnp.asarray([1, 4])))
    want = np.array(filled())
    want[0, :, 1:4], want[1, :, 4:7] = 100, 200
    np.testing.assert_array_equal(after, want)


def test_a_write_takes_the_caches_dtype():
    assert (
        kv.write(filled().astype(jnp.bfloat16), jnp.ones((2, 2, 1, 3)), jnp.zeros(2, jnp.int32)).dtype == jnp.bfloat16
    )


def test_a_new_cache_is_zero_in_every_slot_and_separate_in_every_layer():
    cache = kv.init_cache(3, 2, 2, 8, 4, jnp.bfloat16)
    assert [leaf.shape for leaf in jax.tree.leaves(cache)] == [(2, 2, 8, 4)] * 6
    assert all((leaf == 0).all() and leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(cache))
    assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)}) == 6
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kv.init_cache(2, 3, 2, 16, 8, jnp.bfloat16))) == 6144  # by hand


def test_the_accepted_path_of_a_tree_moves_behind_the_pending_token():
    """Nodes 1 and 3 of four accepted in row 0, none in row 1; the pending token stands at `start`."""
    before = filled()
    start, path = jnp.asarray([2, 3]), jnp.asarray([[1, 3], [-1, -1]])
    [(keys, values)] = kv.commit_path(Cache(((before, before + 1000),)), start, path).layers
    np.testing.assert_array_equal(keys[0, :, :3], before[0, :, :3])
    np.testing.assert_array_equal(keys[0, :, 3], before[0, :, 4])  # node 1 stood at start + 1 + 1
    np.testing.assert_array_equal(keys[0, :, 4], before[0, :, 6])  # node 3 at start + 1 + 3
    np.testing.assert_array_equal(values[0, :, 4], before[0, :, 6] + 1000)
    np.testing.assert_array_equal(keys[1, :, :4], before[1, :, :4])


@pytest.mark.parametrize("start", [5, 6, 7])
def test_a_commit_at_the_end_of_the_cache_leaves_committed_slots_alone(start):
    before = filled()
    path = jnp.asarray([[0, 1, 2], [2, -1, -1]])
    [(keys, _)] = kv.commit_path(Cache(((before, before),)), jnp.full(2, start), path).layers
    np.testing.assert_array_equal(keys[:, :, : start + 1], before[:, :, : start + 1])


def test_a_prompt_of_one_token_writes_slot_zero_and_no_other(tiny):
    model, params = tiny
    state = subjects.start_rows(model, params, Nothing(), (), [[5]], 1)
    for leaf in jax.tree.leaves(state.cache):
        assert (leaf[0, :, 0] != 0).any()


def test_what_stands_in_stale_slots_has_no_weight_at_all(tiny):
    """Zeroed keys would still take a share of the softmax; here even 1e4 takes none."""
    model, params = tiny
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])
    start = jnp.zeros(1, jnp.int32)
    forward = jax.jit(model.forward)
    clean = forward(params, tokens, model.init_cache(1, 16, jnp.float32), start)
    dirty = jax.tree.map(lambda leaf: leaf + 1e4, model.init_cache(1, 16, jnp.float32))
    np.testing.assert_array_equal(forward(params, tokens, dirty, start).hidden, clean.hidden)


def test_a_token_that_overflows_poisons_those_who_see_it_and_no_other(tiny):
    """A rejected draft or the padding of a prompt may be such a token; plain decoding never meets it."""
    model, params = tiny
    embedding = params["embed_tokens"]["weight"]
    broken = params | {"embed_tokens": {"weight": embedding.at[7].set(jnp.nan)}}
    tokens, start = jnp.asarray([[3, 1, 7, 5]]), jnp.zeros(1, jnp.int32)
    forward = jax.jit(model.forward)
    clean = forward(params, tokens, model.init_cache(1, 16, jnp.float32), start).hidden
    hidden = forward(broken, tokens, model.init_cache(1, 16, jnp.float32), start).hidden
    np.testing.assert_array_equal(hidden[:, :2], clean[:, :2])
    assert jnp.isnan(hidden[:, 2:]).all()
