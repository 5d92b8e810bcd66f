"""What a notebook asks of its plans, one call each.

specjax.account(target, drafter, batch=8, context=4096, device="h100")
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, memory, plugins
from specjax.drafter import Drafter
from specjax.language_model import LanguageModel
from specjax.memory.hardware import DEVICES
from specjax.model import Llama


def account(
    target: LanguageModel,
    drafter: Drafter | str,
    *,
    batch: int,
    context: int,
    device: str | None = None,
    cache_dtype: Any = None,
) -> memory.Account:
    """What a strategy holds in memory, beside plain decoding, from shapes: no weights are read, nothing is compiled.

    Args:
      batch: rows that are decoded together.
      context: cache slots a row: its text, and the speculative window.
      device: one of `specjax.memory.hardware.DEVICES`, whose backend decides on padding and copies; by default
        the one that is here.
      cache_dtype: of the KV caches; by default that of the weights.

    Raises:
      ValueError: an unknown device, with the known ones; a drafter that can't serve the target.
    """
    if device is not None and device not in DEVICES:
        raise ValueError(f"unknown device {device!r}: choose from {', '.join(DEVICES)}")
    drafter = plugins.load_drafter(drafter) if isinstance(drafter, str) else drafter
    target.check(drafter)
    backend = jax.default_backend() if device is None else DEVICES[device].platform
    model = Llama.on(backend, target.model.config) if isinstance(target.model, Llama) else target.model
    params = target.shapes()
    own = jax.eval_shape(lambda key, given: drafter.init_params(key, model, given), jax.random.key(0), params)
    return memory.account(
        decode.Program(model, drafter), params, own, batch=batch, capacity=context, backend=backend,
        cache_dtype=jnp.dtype(cache_dtype or target.dtype),
    )  # fmt: skip
