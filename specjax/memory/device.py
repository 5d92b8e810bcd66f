"""What the device itself says of its memory, where its backend keeps account: the third source."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def peak_bytes() -> int | None:
    """The most that this process has held on one device at once; `None` where the backend does not know (a CPU).

    It is the whole process: where several strategies take turns, all of their weights are in it.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak]  # zero is what a backend says that does not count
    return max(known) if known else None


def measured_peak(executable: jax.stages.Compiled, arguments: Any) -> int | None:
    """Run a program on zeros, and say the most that was held; `None` where the backend or its past hide that.

    A device's figure is the most since the process began: it is this program's where it rises now.
    """
    if peak_bytes() is None:  # a device that has held nothing yet says zero: let it hold something
        jax.block_until_ready(jnp.zeros((1024,)))
    before = peak_bytes()
    if before is None:
        return None
    args, kwargs = jax.tree.map(_zeros, arguments)
    jax.block_until_ready(executable(*args, **kwargs))
    after = peak_bytes()
    return after if after is not None and after > before else None


def _zeros(leaf: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)
