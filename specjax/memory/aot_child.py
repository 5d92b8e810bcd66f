"""The child process of `specjax.memory.aot`: a request as JSON in, a refusal as JSON out."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import jax
from jax.experimental import topologies

from specjax import decode, mesh
from specjax.memory import hardware
from specjax.memory.buffer_assignment import dump_options, out_of_memory
from specjax.memory.gpu_targets import GPU_TARGETS
from specjax.memory.round_trace import state_shapes
from specjax.memory.strategy import Strategy


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Compile, with the buffers' assignment written where the parent waits for it; or the compiler's refusal."""
    strategy, device = Strategy(**request["strategy"]), hardware.find(request["device"])
    devices = topology(device, request["mesh"])
    layout = mesh.split(len(devices), strategy.model.config.num_kv_heads, data=request["data"])
    try:
        lower(strategy, layout, devices).compile(compiler_options=dump_options(request["folder"]))
    except jax.errors.JaxRuntimeError as error:
        return {"refusal": out_of_memory(error)[:20_000]}
    return {"refusal": ""}


def topology(device: hardware.Device, shape: str) -> Any:
    """The devices of a machine that is not here."""
    if device.platform == "tpu":
        sizes = [int(part) for part in shape.split("x")]
        host = [min(2, size) for size in sizes[:2]]  # chips of one host: 2x2x1, or fewer in a mesh that is smaller
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{device.topology}:{shape}",
            chips_per_host_bounds=[*host, *(1,) * (3 - len(host))],
        ).devices
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=device.topology or "",
        topology=f"1x1x{hardware.chips(shape)}",
        target_config=GPU_TARGETS[device.name].proto,
    ).devices


def lower(strategy: Strategy, layout: mesh.Layout, devices: Any) -> jax.stages.Lowered:
    """The donated loop of rounds, partitioned. Its result keeps the state's sharding, so that it can be aliased."""
    program, *weights = strategy.shapes()
    state, grid = state_shapes(program, *weights, **strategy.options()), layout.mesh(devices)
    placed = [_placed(tree, layout.shardings(grid, "weights", tree)) for tree in weights]
    shardings = layout.state_shardings(grid, state)
    loop = jax.jit(inspect.unwrap(decode.run), static_argnums=0, donate_argnums=3, out_shardings=shardings)
    return loop.lower(program, *placed, _placed(state, shardings))


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )


if __name__ == "__main__":
    print("\n" + json.dumps(answer(json.loads(sys.argv[1]))))
