"""The child process of `specjax.memory.ahead`: a request as JSON on stdin, figures as JSON on stdout."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from typing import Any

import jax
from jax.experimental import topologies

from specjax import decode
from specjax.memory import hardware, sharding
from specjax.memory.compiler import Compiled, read
from specjax.memory.shapes import is_cache
from specjax.memory.state import state_shapes
from specjax.memory.strategies import Strategy


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile, and read the figures, or the compiler's refusal."""
    strategy, device = Strategy(**request["strategy"]), hardware.find(request["device"])
    devices = topology(device, request["mesh"])
    layout = sharding.layout(len(devices), strategy.model.config.num_kv_heads, data=request["data"])
    try:
        executable = lower(strategy, layout, devices).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        nothing = dataclasses.astuple(Compiled(None, None, None, None))
        return {"figures": nothing, "refusal": str(error)[:4000], "largest": []}
    return {"figures": dataclasses.astuple(read(executable)), "refusal": "", "largest": largest(executable)}


def topology(device: hardware.Device, mesh: str) -> Any:
    """The devices of a machine that is not here."""
    if device.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{device.topology}:{mesh}").devices
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=device.topology or "",
        topology=f"1x1x{hardware.chips(mesh)}",
        target_config=hardware.GPU_TARGETS[device.name],
    ).devices


def lower(strategy: Strategy, layout: sharding.Layout, devices: Any) -> jax.stages.Lowered:
    """The donated round, partitioned. Its result keeps the state's sharding, so that it can be aliased."""
    program, params, drafter_params = strategy.shapes()
    state = state_shapes(program, params, drafter_params, **strategy.options())
    mesh = layout.mesh(devices)
    params, drafter_params = (layout.place(mesh, "weights", tree) for tree in (params, drafter_params))
    state = place_state(layout, mesh, state)
    function = jax.jit(
        decode.decode_round,
        static_argnums=0,
        donate_argnums=3,
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
    )
    return function.lower(program, params, drafter_params, state)


def place_state(layout: sharding.Layout, mesh: Any, state: Any) -> Any:
    """The state's shapes with shardings: caches by heads, all else by rows."""
    caches = [node for node in jax.tree.leaves(state, is_leaf=is_cache) if is_cache(node)]
    kv = {id(leaf) for leaf in jax.tree.leaves(caches)}
    placed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=jax.NamedSharding(mesh, layout.spec("kv" if id(leaf) in kv else "state", path, leaf)),
        ),
        state,
    )
    return placed


_SHAPE = re.compile(r"= ([a-z0-9]+)\[([0-9,]*)\]\S* ([a-z-]+)\(")
_WIDTH = {"f32": 4, "bf16": 2, "s32": 4, "pred": 1, "f8e4m3fn": 1, "u32": 4, "f16": 2, "s8": 1, "u8": 1}


def largest(executable: jax.stages.Compiled, count: int = 5) -> list[tuple[str, int]]:
    """The largest results of the compiled program by operation and shape: candidates for its temporaries."""
    found: Counter[str] = Counter()
    for kind, sizes, operation in _SHAPE.findall(executable.as_text() or ""):
        if operation in ("parameter", "get-tuple-element", "bitcast", "tuple"):
            continue
        size = _WIDTH.get(kind, 4)
        for part in filter(None, sizes.split(",")):
            size *= int(part)
        found[f"{operation} {kind}[{sizes}]"] = size
    return found.most_common(count)


if __name__ == "__main__":
    print("\n" + json.dumps(answer(json.load(sys.stdin))))
