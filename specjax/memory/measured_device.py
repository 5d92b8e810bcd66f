"""The device that is here: its bandwidth, rate of products and links to slower tiers, measured, and what it holds.

What a decoding step can reach, not what the maker promises: the bandwidth is that of a product of a large
matrix with one vector, which is what decoding does to weights; the rate is that of a product of two large
matrices. Best of several, compiled before; a machine that others use measures lower.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.memory.hardware import Device

REPEATS = 5
LARGE_BYTES = 256 << 20  # beyond any cache
NVME_PROBE_BYTES = 64 << 20


@functools.cache
def measure() -> Device:
    """Measure the default backend's first device; takes a few seconds, once a process."""
    device = jax.devices()[0]
    dtype = jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
    memory, total = _memory(device)
    kind = device.device_kind
    return Device(
        name="this",
        platform=device.platform,
        hbm_bytes=total,
        bandwidth_bytes_per_s=_bandwidth(dtype),
        bf16_flop_per_s=_flop_rate(dtype),
        fp8_flop_per_s=None,
        link_bytes_per_s=None,
        source=f"measured now on this machine ({kind}, {dtype.name} products)",
        usable_bytes=memory,
        host_bytes_per_s=_host_rate(device),
        nvme_bytes_per_s=_disk_rate(),
    )


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the quickest of several runs."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def _bandwidth(dtype: Any) -> float:
    width = 8192
    rows = LARGE_BYTES // (width * dtype.itemsize)
    matrix, vector = jnp.ones((rows, width), dtype), jnp.ones((width,), dtype)
    product = jax.jit(lambda a, b: a @ b)
    return matrix.nbytes / _best(lambda: product(matrix, vector))


def _flop_rate(dtype: Any) -> float:
    width = 1536 if dtype == jnp.float32 else 8192
    matrix = jnp.ones((width, width), dtype)
    product = jax.jit(lambda a: a @ a)
    return 2 * width**3 / _best(lambda: product(matrix))


def _memory(device: Any) -> tuple[int, int]:
    """Usable and whole: what the runtime allows, or the machine's memory where the backend doesn't say."""
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return int(limit), int(limit)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _host_rate(device: Any) -> float | None:
    """From pinned host memory to the device; on a CPU that is a copy within one memory."""
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        return None
    there, here = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", "device"))
    block = jax.device_put(jnp.ones((LARGE_BYTES // 4,), jnp.float32), there)
    bring = jax.jit(lambda x: jax.device_put(x, here) + 0)
    return block.nbytes / _best(lambda: bring(block))


def _disk_rate() -> float | None:
    """Reading a file of the temporary folder past the page cache; `None` where the system can't."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe"
        path.write_bytes(os.urandom(1 << 20) * (NVME_PROBE_BYTES >> 20))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if not hasattr(os, "posix_fadvise"):
                return None
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            while file.read(8 << 20):
                pass
            return NVME_PROBE_BYTES / (time.perf_counter() - begin)


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
