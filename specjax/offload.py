"""A drafter's weights in host memory between drafts: less device memory at verification, a fetch each round.

The weights are arguments of the compiled loop in a memory of the kind `pinned_host`; the wrapper brings them to
the device before it drafts and lets go of them behind. The TPU's compiler copies inside of the loop, into the
loop's temporaries: a device needs less only as far as verification can use that space. On a CPU both memories
are one, and the loop copies nothing.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Key, PyTree

from specjax.drafter import Drafter, Wrapper
from specjax.types import Draft, Keys, Model, Params, Seen, Target, Text

HOST = "pinned_host"
PLACES = ("host",)


@dataclass(frozen=True)
class Offloaded(Wrapper):
    """A drafter whose weights wait in host memory; it drafts what the inner one drafts."""

    def params(self, key: Key[Array, ""], model: Model, target_params: Params) -> Params:
        """The inner drafter's, moved to the host."""
        return to_host(self.inner.params(key, model, target_params))

    def init(self, params: Params, model: Model, batch: int, capacity: int, dtype: Any) -> PyTree[Array]:
        return self.inner.init(fetch(params), model, batch, capacity, dtype)

    def observe(self, params: Params, state: PyTree[Array], seen: Seen) -> PyTree[Array]:
        return self.inner.observe(fetch(params), state, seen)

    def propose(self, keys: Keys, params: Params, state: PyTree[Array], target: Target) -> Draft:
        return self.inner.propose(keys, fetch(params), state, target)

    def log_probs(self, params: Params, text: Text) -> Float[Array, "B P K V"] | None:
        return self.inner.log_probs(fetch(params), text)


def fetch(params: Params) -> Params:
    """The weights on the device, for one call. Traced."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), params)


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


def move(drafter: Drafter, params: Params) -> tuple[Drafter, Params]:
    """A drafter and its weights, which wait on the host from now on; unchanged where there are none."""
    return (Offloaded(inner=drafter), to_host(params)) if jax.tree.leaves(params) else (drafter, params)


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
