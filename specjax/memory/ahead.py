"""The real TPU and GPU compilers, ahead of time: what they give a round, on a machine without the device.

Each compilation runs in a child process with an environment of its own: the plug-ins look for devices
when jax is imported, and must find none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from specjax.memory import hardware
from specjax.memory.compiler import Compiled
from specjax.memory.strategies import Strategy

TIMEOUT_S = 600


class CompilerMissingError(RuntimeError):
    """The device's compiler is not installed."""


@dataclass(frozen=True)
class Ahead:
    """One compilation: figures per device, or why there are none (`refusal`: it does not fit, in its words)."""

    figures: Compiled
    refusal: str
    compile_s: float
    largest: tuple[tuple[str, int], ...] = ()  # temporaries by their operation, the largest first


def compile_ahead(strategy: Strategy, device: hardware.Device, mesh: str, *, data: int = 1) -> Ahead:
    """Compile a strategy's donated round for `mesh` of `device`.

    Raises:
      CompilerMissingError: with the extra that installs it.
      RuntimeError: the child process failed for another reason than memory, with the end of what it said.
    """
    check_installed(device)
    request = {"strategy": strategy.asdict(), "device": device.name, "mesh": mesh, "data": data}
    begin = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-m", "specjax.memory.ahead_child"],
        input=json.dumps(request),
        env=_environment(device, mesh),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    seconds = time.perf_counter() - begin
    answer = child.stdout.rpartition("\n{")[2] if "\n{" in child.stdout else child.stdout.removeprefix("{")
    if child.returncode or not answer:
        raise RuntimeError(f"compiling for {device.name} {mesh} failed:\n{child.stderr[-1500:]}")
    found = json.loads("{" + answer)
    return Ahead(Compiled(*found["figures"]), found["refusal"], seconds, tuple(map(tuple, found["largest"])))


def check_installed(device: hardware.Device) -> None:
    """Raise unless the device's ahead-of-time compiler is here."""
    extra, modules = {"tpu": ("tpu-aot", ("libtpu",)), "gpu": ("cuda-aot", ("jax_cuda13_plugin", "nvidia.cu13"))}[
        device.platform
    ]
    if device.topology is None:
        known = ", ".join(name for name, other in hardware.DEVICES.items() if other.topology)
        raise CompilerMissingError(f"no ahead-of-time compiler for {device.name}: there is one for {known}")
    for module in modules:
        if _spec(module) is None:
            raise CompilerMissingError(
                f"the compiler for {device.name} is not installed ({module} is missing): "
                f"run `python -m pip install 'specjax[{extra}]'`"
            )


def _spec(module: str) -> object:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def _environment(device: hardware.Device, mesh: str) -> dict[str, str]:
    variables = dict(os.environ, JAX_PLATFORMS="cpu")
    if device.platform == "tpu":
        variables |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": f"{device.topology}:{mesh}",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
    else:
        spec = importlib.util.find_spec("nvidia.cu13")
        folders = spec.submodule_search_locations if spec else None
        variables["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={next(iter(folders or ()))}"
    return variables
