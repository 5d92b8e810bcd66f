"""A drafter's weights in host memory between drafts: less device memory at verification, a fetch each round.

The weights are arguments of the compiled loop in a memory of the kind `pinned_host`; the round brings them to
the device before it drafts and lets go of them behind. The TPU's compiler copies inside of the loop, into the
loop's temporaries: a device needs less only as far as verification can use that space. On a CPU both memories
are one, and the loop copies nothing.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax

from specjax.types import Params

HOST = "pinned_host"
PLACES = ("host",)


def check(place: str, device: Any = None) -> None:
    """Refuse a place that is not known, or that the backend does not have.

    Raises:
      ValueError: with the kinds of memory that there are.
    """
    if place not in PLACES:
        raise ValueError(f"offload={place!r}: must be one of {', '.join(PLACES)}")
    device = device or jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if HOST not in kinds:
        raise ValueError(
            f"offload={place!r}: {device.platform} has no memory of the kind {HOST}, only {', '.join(sorted(kinds))}: "
            "leave the drafter's weights on the device"
        )


def to_host(params: Params) -> Params:
    """The same weights in host memory."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST)), params)


def size(params: Params) -> int:
    """Bytes that a fetch brings in."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def fetch_s(params: Params, repeats: int = 5) -> float:
    """Median seconds of bringing offloaded weights to the device, on its own and synchronised; 0 without weights."""
    if not jax.tree.leaves(params):
        return 0.0
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        there = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("device")), params)
        jax.block_until_ready(there)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
