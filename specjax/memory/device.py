"""What the device itself says of its memory, where its backend keeps account: the third source."""

from __future__ import annotations

import jax


def peak_bytes() -> int | None:
    """The most that this process has held on one device at once; `None` where the backend does not know (a CPU).

    It is the whole process: where several strategies take turns, all of their weights are in it.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak]  # zero is what a backend says that does not count
    return max(known) if known else None
