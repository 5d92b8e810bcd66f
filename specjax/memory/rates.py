"""What a run reached: bytes and operations of its rounds, from shapes, by the times that were measured."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode
from specjax import drafter as drafters
from specjax.memory.hardware import Device
from specjax.memory.sharding import Layout
from specjax.memory.state import state_shapes
from specjax.memory.traffic import PHASES, traffic
from specjax.model import Llama, ModelConfig
from specjax.model.config import RopeScaling


def of_row(
    row: Mapping[str, Any], manifest: Mapping[str, Any], capacity: int, device: Device | None
) -> dict[str, float] | None:
    """Rates of one drafter's rounds; `None` where the run did not time them or the drafter can't be rebuilt.

    Args:
      capacity: slots of the batch that was timed: the smallest of the run.
      device: what it ran on, for the ridge (operations a byte) and the share of its bandwidth.
    """
    if row.get("draft_s") is None or row.get("verify_s") is None:
        return None
    try:
        program, params, own = _rebuild(row, manifest)
        options: dict[str, Any] = {"batch": manifest["batch_size"], "capacity": capacity}
        state = state_shapes(program, params, own, cache_dtype=manifest["target"]["dtype"], **options)
        found = traffic(program, params, own, state, Layout(), manifest["device"]["platform"])
    except (ValueError, KeyError, OSError, RuntimeError):
        return None
    seconds = row["draft_s"] + row["verify_s"]
    rates = {
        "bytes_per_s": sum(found.memory_bytes(phase) for phase in PHASES) / seconds,
        "flop_per_s": sum(found.flop(phase) for phase in PHASES) / seconds,
    }
    if device is not None:
        rates["ridge"] = device.bf16_flop_per_s / device.bandwidth_bytes_per_s
        rates["share"] = rates["bytes_per_s"] / device.bandwidth_bytes_per_s
    return rates


def _rebuild(row: Mapping[str, Any], manifest: Mapping[str, Any]) -> tuple[decode.Program, Any, Any]:
    config = dict(manifest["target"]["config"])
    if config.get("rope_scaling"):
        config["rope_scaling"] = RopeScaling(**config["rope_scaling"])
    model = Llama(ModelConfig(**config))
    name = row["drafter"] if ".py:" in row["drafter"] else row["drafter"].partition(":")[0]
    fields = _fields(row["settings"]) if name != "none" else {}
    drafter = drafters.load(name, fields)
    dtype = jnp.dtype(manifest["target"]["dtype"])
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model.shapes())
    own = jax.eval_shape(lambda key, weights: drafter.params(key, model, weights), jax.random.key(0), params)
    return decode.Program(model, drafter), params, own


def _fields(settings: str) -> dict[str, str]:
    """Settings of a drafter as it prints itself: `NGram(num_speculative_tokens=7)`."""
    call = ast.parse(settings, mode="eval").body
    assert isinstance(call, ast.Call)
    return {word.arg or "": str(ast.literal_eval(word.value)) for word in call.keywords}
