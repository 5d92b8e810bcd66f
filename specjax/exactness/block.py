"""Block verification and its relatives on a chain: controls and regression mutants of the lab.

Sun et al. 2024 (arXiv 2403.10444, algorithm 2). Hierarchical verification (arXiv 2601.05724) with its
prefix ratio capped, as specified, stops with the same probabilities at the same places; with the last
ratio left uncapped it changes the law.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.types import Draft


def block(
    log_p: Float[Array, "B K+1 V"],
    draft: Draft,
    live: Bool[Array, "B K"],
    u: Float[Array, "B K"],
    *,
    stop: bool = False,
    token_residual: bool = False,
    uncapped: bool = False,
    hierarchical: bool = False,
) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """Accepted drafts, and the law of the further token.

    Args:
      stop: end at the first failure, as token verification does (wrong).
      token_residual: redraw from max(p - q, 0) without the weight of the prefix (wrong).
      uncapped: the last ratio is the product of all ratios, not clipped on its way (wrong).
      hierarchical: write the acceptance as the ratio of the two divergences of the weighted law.
    """
    assert draft.log_q is not None
    rows, length = draft.tokens.shape
    p, q = jnp.exp(log_p), jnp.exp(draft.log_q)
    count = live.sum(-1, dtype=jnp.int32)
    weight = product = jnp.ones((rows,), p.dtype)
    accepted, law = jnp.zeros((rows,), jnp.int32), _residual(p[:, 0], q[:, 0])
    law = jnp.where((count == 0)[:, None], p[:, 0], law)
    going = jnp.ones((rows,), bool)
    for i in range(length):
        token = draft.tokens[:, i : i + 1]
        ratio = (jnp.take_along_axis(p[:, i], token, 1) / jnp.take_along_axis(q[:, i], token, 1))[:, 0]
        product = product * ratio
        weight = jnp.minimum(weight * ratio, 1)
        last = count == i + 1
        following = q[:, min(i + 1, length - 1)]
        gain = jnp.maximum(weight[:, None] * p[:, i + 1] - following, 0).sum(-1)
        loss = gain + 1 - weight
        if hierarchical:
            loss = jnp.maximum(following - weight[:, None] * p[:, i + 1], 0).sum(-1)
        inside = jnp.where(loss > 0, gain / jnp.where(loss > 0, loss, 1), 1)
        chance = jnp.where(last, jnp.minimum(product, 1) if uncapped else weight, inside)
        success = live[:, i] & (u[:, i] < chance) & going
        going = going & (success | (not stop))
        rest = _residual(p[:, i + 1] if token_residual else weight[:, None] * p[:, i + 1], following)
        accepted = jnp.where(success, i + 1, accepted)
        law = jnp.where(success[:, None], jnp.where(last[:, None], p[:, i + 1], rest), law)
    return accepted, law


def _residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    mass = jnp.maximum(p - q, 0)
    total = mass.sum(-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), p)
