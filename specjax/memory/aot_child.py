"""The child process of `specjax.memory.aot`: a request as JSON in, a refusal as JSON out."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import jax
from jax.experimental import topologies

from specjax import decode
from specjax import mesh as sharding
from specjax.memory import hardware
from specjax.memory.account import is_cache
from specjax.memory.buffer_assignment import dump_options
from specjax.memory.gpu_targets import GPU_TARGETS
from specjax.memory.round_trace import state_shapes
from specjax.memory.strategy import Strategy


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Compile, with the buffers' assignment written where the parent waits for it; or the compiler's refusal."""
    strategy, device = Strategy(**request["strategy"]), hardware.find(request["device"])
    devices = topology(device, request["mesh"])
    layout = sharding.layout(len(devices), strategy.model.config.num_kv_heads, data=request["data"])
    try:
        lower(strategy, layout, devices).compile(compiler_options=dump_options(request["folder"]))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refusal": str(error)[:20_000]}
    return {"refusal": ""}


def topology(device: hardware.Device, mesh: str) -> Any:
    """The devices of a machine that is not here."""
    if device.platform == "tpu":
        sizes = [int(part) for part in mesh.split("x")]
        host = [min(2, size) for size in sizes[:2]]  # chips of one host: 2x2x1, or fewer in a mesh that is smaller
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{device.topology}:{mesh}",
            chips_per_host_bounds=[*host, *(1,) * (3 - len(host))],
        ).devices
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=device.topology or "",
        topology=f"1x1x{hardware.chips(mesh)}",
        target_config=GPU_TARGETS[device.name].proto,
    ).devices


def lower(strategy: Strategy, layout: sharding.Layout, devices: Any) -> jax.stages.Lowered:
    """The donated loop of rounds, partitioned. Its result keeps the state's sharding, so that it can be aliased."""
    program, params, drafter_params = strategy.shapes()
    state = state_shapes(program, params, drafter_params, **strategy.options())
    mesh = layout.mesh(devices)
    params, drafter_params = (layout.place(mesh, "weights", tree) for tree in (params, drafter_params))
    state = place_state(layout, mesh, state)
    loop = jax.jit(
        inspect.unwrap(decode.run),
        static_argnums=0,
        donate_argnums=3,
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
    )
    return loop.lower(program, params, drafter_params, state)


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


if __name__ == "__main__":
    print("\n" + json.dumps(answer(json.loads(sys.argv[1]))))
