"""From logits to probabilities, and from these to a token.

This is the only place where temperature, top-k, top-p and min-p live. Target, drafter and baseline all
call `log_probs`, so that they can't disagree about the order of the filters: temperature, then top-k,
then top-p, then min-p, each on the probabilities that the one before it left.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax.types import Keys, Sampling

DRAFT, ACCEPT, BONUS = 0, 1, 2
"""Roles of a round's random streams. The bonus token comes from the residual or from p: a round draws it once."""

SEEDS = 1 << 32


def make_sampling(
    batch: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
) -> Sampling:
    """Check sampling options and bring them to `[batch]` arrays of a fixed dtype.

    Raises:
      ValueError: a value outside its range, named with the range.
    """
    rules = (
        ("temperature", temperature, np.float32, lambda x: x >= 0, ">= 0 (0 is greedy)"),
        ("top_k", top_k, np.int32, lambda x: x >= 0, ">= 0 (0 keeps every token)"),
        ("top_p", top_p, np.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1] (1 keeps every token)"),
        ("min_p", min_p, np.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1] (0 keeps every token)"),
    )
    arrays = {}
    for name, value, dtype, allowed, text in rules:
        wide = np.asarray(value, np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            array = wide.astype(dtype)  # checked as it is used: a top_p of 1e-60 is zero
        if not np.all(np.isfinite(wide) & np.isfinite(array)) or not np.all(allowed(wide) & allowed(array)):
            raise ValueError(f"{name}={value!r}: must be finite and {text}")
        arrays[name] = jnp.asarray(np.broadcast_to(array, (batch,)))
    return Sampling(**arrays)


def row_keys(seed: int, rows: Sequence[int]) -> Keys:
    """One key a row, from the run's seed and the row's own number, whatever batch it stands in.

    Raises:
      ValueError: a seed that `jax.random.key` would cut to 32 bits, so that it would repeat another's numbers.
    """
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed={seed}: must be 0 to {SEEDS - 1}")
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.asarray(rows, jnp.uint32))


def fold(keys: Keys, data: int | Int[Array, ""] | Int[Array, "B"]) -> Keys:
    """`fold_in` a row at a time: with a row's round, then with a role, then with a position."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(jnp.asarray(data, jnp.uint32), keys.shape))


def log_probs(logits: Float[Array, "B S V"], sampling: Sampling) -> Float[Array, "B S V"]:
    """What is sampled from: log-probabilities in float32 (-inf for excluded tokens).

    NaN logits get probability 0; a row without any finite logit becomes uniform (the caller flags it).
    Ties at a threshold are kept, ties at temperature 0 go to the lowest id.
    """
    x = logits if logits.dtype == jnp.float64 else logits.astype(jnp.float32)
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    top = x.max(-1, keepdims=True)
    x = jnp.where(jnp.isfinite(top), x - jnp.where(jnp.isfinite(top), top, 0), jnp.where(x == top, 0, -jnp.inf))

    temperature = sampling.temperature[:, None, None].astype(x.dtype)
    greedy = temperature == 0
    scaled = x / jnp.where(greedy, 1, temperature)
    one_hot = jnp.where(jnp.arange(x.shape[-1])[None, None] == jnp.argmax(x, -1, keepdims=True), 0, -jnp.inf)
    x = jnp.where(greedy, one_hot.astype(x.dtype), scaled)

    ranked = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    x = jax.lax.cond(ranked, _keep_top, lambda x, _: x, x, sampling)  # a sort of V costs more than a small model
    floor = jnp.log(sampling.min_p)[:, None, None].astype(x.dtype)  # the largest log-weight is 0
    return jax.nn.log_softmax(jnp.where(x >= floor, x, -jnp.inf), -1)


def _keep_top(x: Float[Array, "B S V"], sampling: Sampling) -> Float[Array, "B S V"]:
    """Top-k, then top-p (the smallest set whose mass reaches `top_p`), on log-weights with maximum 0.

    Rows and positions are one dimension here, and the k-th largest is found without indexing: otherwise a
    TPU lays the ordered rows out with S, padded to 128, as their minor dimension (0.5 GiB for 8 rows of 6).
    """
    batch, queries, vocab = x.shape
    rows = x.reshape(batch * queries, vocab)
    top_k, top_p = (jnp.repeat(value, queries)[:, None] for value in (sampling.top_k, sampling.top_p.astype(x.dtype)))
    ordered = -jnp.sort(-rows, -1, stable=False)  # a stable sort carries indices along
    kept = (jnp.arange(vocab, dtype=jnp.int32)[None] < top_k) | (top_k == 0)
    kept = ordered >= jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
    weight = jnp.where(kept, jnp.exp(ordered), 0)
    before = jnp.cumsum(weight, -1) - weight
    kept &= (before < top_p * weight.sum(-1, keepdims=True)) | (before == 0) | (top_p >= 1)  # 1e-40 may count as zero
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(rows >= threshold, rows, -jnp.inf).reshape(x.shape)


def draw(keys: Keys, log_p: Float[Array, "B V"]) -> Int[Array, "B"]:
    """One token a row (Gumbel-max, noise of high precision so that rare tokens stay reachable).

    A batch of point masses skips the noise: their draw is the same with any.
    """
    certain = jnp.all(jnp.sum(log_p > -jnp.inf, -1) == 1)
    return jax.lax.cond(certain, lambda _, log_p: jnp.argmax(log_p, -1), _gumbel_max, keys, log_p).astype(jnp.int32)


def _gumbel_max(keys: Keys, log_p: Float[Array, "B V"]) -> Int[Array, "B"]:
    def one(key: Key[Array, ""], row: Float[Array, "V"]) -> Int[Array, ""]:
        return jax.random.categorical(key, row, mode="high")

    return jax.vmap(one)(keys, log_p)


def uniforms(keys: Keys, count: int) -> Float[Array, "B N"]:
    """Uniforms in [0, 1), `count` a row."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(keys)
