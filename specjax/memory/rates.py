"""What a run reached: bytes and operations of its rounds, from shapes, by the times that were measured."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, plugins
from specjax.drafter import Drafter
from specjax.memory.hardware import Device
from specjax.memory.jaxpr_traffic import PHASES, traffic
from specjax.memory.round_trace import trace_round
from specjax.mesh import Layout
from specjax.model import Llama, ModelConfig
from specjax.model.config import RopeScaling
from specjax.weights.checkpoint import sha256_of


def of_row(
    row: Mapping[str, Any],
    manifest: Mapping[str, Any],
    capacity: int,
    device: Device | None,
    drafters: Iterable[Drafter] = (),
) -> dict[str, float] | str:
    """Rates of one drafter's rounds, or why they can't be known.

    A run may come from anybody: what its files name is neither run nor opened.

    Args:
      capacity: slots of the batch that was timed: the smallest of the run.
      device: what it ran on, for the ridge (operations a byte) and the share of its bandwidth.
      drafters: those of the run that are code or weights of a file, from the reader's own hand.
    """
    if row.get("draft_s") is None or row.get("verify_s") is None:
        return "the run did not time its rounds' halves"
    seconds = row["draft_s"] + row["verify_s"]
    if not seconds:
        return "the run says that its rounds took 0 s"
    try:
        sizes: dict[str, Any] = {"batch": manifest["batch_size"], "capacity": capacity}
        traced = trace_round(*_rebuild(row, manifest, drafters), cache_dtype=manifest["target"]["dtype"], **sizes)
        found = traffic(traced, Layout(), manifest["device"]["platform"])
    except Exception as error:  # a drafter's file is its author's code, and may have changed or gone since
        return f"its rounds can't be traced again: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    rates = {
        "bytes_per_s": sum(found.memory_bytes(phase) for phase in PHASES) / seconds,
        "flop_per_s": sum(found.flop(phase) for phase in PHASES) / seconds,
    }
    if device is not None:
        rates["ridge"] = device.bf16_flop_per_s / device.bandwidth_bytes_per_s
        rates["share"] = rates["bytes_per_s"] / device.bandwidth_bytes_per_s
    return rates


def _rebuild(
    row: Mapping[str, Any], manifest: Mapping[str, Any], drafters: Iterable[Drafter]
) -> tuple[decode.Program, Any, Any]:
    config = dict(manifest["target"]["config"])
    if config.get("rope_scaling"):
        config["rope_scaling"] = RopeScaling(**config["rope_scaling"])
    model = Llama(ModelConfig(**config))
    drafter = _drafter(row, manifest, drafters)
    dtype = jnp.dtype(manifest["target"]["dtype"])
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model.shapes())
    own = jax.eval_shape(lambda key, weights: drafter.params(key, model, weights), jax.random.key(0), params)
    return decode.Program(model, drafter), params, own


def _drafter(row: Mapping[str, Any], manifest: Mapping[str, Any], drafters: Iterable[Drafter]) -> Drafter:
    """The reader's own of the same settings and the same code; else one of specjax's, without a file."""
    for drafter in drafters:
        if repr(drafter) == row["settings"]:
            source = getattr(sys.modules.get(type(drafter).__module__), "__file__", None)
            shipped = type(drafter).__module__.startswith("specjax.")
            if shipped or (source and sha256_of(Path(source)) in manifest["drafter_files"].values()):
                return drafter
            raise ValueError(f"{source} is not the file that the run was made with: its hash is another one")
    name, fields = str(row["drafter"]).partition(":")[0], _fields(str(row.get("settings")))
    if name not in plugins.available() or fields.get("checkpoint"):
        raise ValueError("it is code or weights of a file, which reading a run does not open: name it with --drafter")
    return dataclasses.replace(plugins.load_drafter(name), **fields)


def _fields(settings: str) -> dict[str, Any]:
    """Fields of a drafter as it prints itself: `NGram(num_speculative_tokens=7)`."""
    try:
        call = ast.parse(settings, mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            return {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"its settings {settings} are not of the form Name(field=value) with values of plain Python")
