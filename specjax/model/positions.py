"""Where tokens stand and what they see: visibility of slots, and rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.model.config import ModelConfig, RopeScaling


def visible_slots(
    capacity: int,
    start: Int[Array, "B"],
    queries: int,
    positions: Int[Array, "B M"],
    mask: Bool[Array, "S M"] | Bool[Array, "B S M"] | None,
    window: int | None,
) -> Bool[Array, "B S T"]:
    """Which slots each query sees: all below the last M, and of these what `mask` allows.

    A sliding window counts positions; below the last M slots, a slot's number is its position.
    """
    slot = jnp.arange(capacity, dtype=start.dtype)[None, None]
    own = positions[:, -queries:, None]
    width = positions.shape[1]
    offset = slot - (start + queries - width)[:, None, None]
    if mask is None:
        visible = slot <= (start[:, None] + jnp.arange(queries, dtype=start.dtype)[None])[:, :, None]
    else:
        mask = jnp.broadcast_to(mask, (start.shape[0], queries, width))
        index = jnp.broadcast_to(jnp.clip(offset, 0, width - 1), (start.shape[0], queries, capacity))
        inside = (offset >= 0) & (offset < width)
        visible = (offset < 0) | (inside & jnp.take_along_axis(mask, index, 2))
    if window is not None:
        at = slot
        if mask is not None:  # a node's position is its depth, not its slot
            index = jnp.clip(offset[:, 0], 0, width - 1)
            at = jnp.where(offset < 0, slot, jnp.take_along_axis(positions, index, 1)[:, None])
        visible &= at > own - window
    return visible


def whole_text(
    start: Int[Array, "B"], queries: int, documents: Int[Array, "B S"] | None, window: int | None
) -> tuple[Int[Array, "B S"], Bool[Array, "B S S"]]:
    """Positions, and what each query sees, of whole sequences: what stands before it in its own document."""
    index = jnp.arange(queries, dtype=start.dtype)[None]
    visible = jnp.broadcast_to(index[:, :, None] >= index[:, None], (start.shape[0], queries, queries))
    positions = start[:, None] + index
    if documents is not None:
        same = documents[:, :, None] == documents[:, None]
        visible &= same
        positions = visible.sum(-1, dtype=start.dtype) - 1  # its place among those before it
    if window is not None:
        visible &= positions[:, None] > positions[:, :, None] - window
    return positions, visible


def rotary_factors(
    positions: Int[Array, "B S"], config: ModelConfig, dtype: Any
) -> tuple[Float[Array, "B S 1 half"], Float[Array, "B S 1 half"]]:
    """Cosines and sines, half a head wide (RoFormer, arXiv 2104.09864, eq. 34, in the half-split layout)."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = _stretch(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def _stretch(frequencies: Float[Array, "D"], scaling: RopeScaling | None) -> Float[Array, "D"]:
    if scaling is None:
        return frequencies
    if scaling.divisors:
        frequencies = frequencies / jnp.asarray(scaling.divisors, frequencies.dtype)
    if scaling.kind != "llama3":
        return frequencies / scaling.factor
    # Llama 3.1: long waves are stretched, short ones kept, and those between blended.
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(
    x: Float[Array, "B S H W"], rotary: tuple[Float[Array, "B S 1 half"], Float[Array, "B S 1 half"]]
) -> Float[Array, "B S H W"]:
    """Turn the first half of each head against the second."""
    cos, sin = rotary
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
