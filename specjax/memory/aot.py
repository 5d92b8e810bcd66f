"""The real TPU and GPU compilers, ahead of time: what they give the loop of rounds, on a machine without the device.

Each compilation runs in a child process with an environment of its own: the plug-ins look for devices
when jax is imported, and must find none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from specjax.memory import compiler, hardware
from specjax.memory.buffer_assignment import Assignment, dump_options, out_of_memory, read_dump, read_refusal
from specjax.memory.measured_device import measured_peak
from specjax.memory.strategy import Strategy

TIMEOUT_S = 600
LIBTPU_ARGS = {"tpu-v7": "--xla_tpu_control_large_2nd_minor_layout_for_x16=false"}
"""What a program should run with: a TPU v7's compiler lays 16-bit weights out in tiles of 16 x 128 within a loop and of
8 x 128 outside, and holds both copies, unless it is told otherwise (in the variable LIBTPU_INIT_ARGS)."""
PROGRAM_BYTES = 2**29
"""Room for the program itself, whose size is not known before it is made: 24 to 45 MiB for 32 layers on a TPU v5e."""


class CompilerMissingError(RuntimeError):
    """The device's compiler is not installed."""


@dataclass(frozen=True)
class Ahead:
    """One compilation: what a device holds, or why that is not known (`refusal`: it does not fit, in its words)."""

    figures: Assignment | None
    refusal: str
    seconds: float  # all of it: a process that starts, traces and compiles until buffers are assigned
    device_bytes: int | None = None  # what the device itself said after a run; `None` is unknown

    def __str__(self) -> str:
        """One line: where the bytes are, or what did not fit."""
        parts = [f"does not fit: {read_refusal(self.refusal)}"] if self.refusal else []
        if self.figures is not None:
            largest = (f"{name} {size / 2**20:.1f}" for name, size in self.figures.temporaries[:3])
            argument_gib, temp_mib = self.figures.argument_bytes / 2**30, self.figures.temp_bytes / 2**20
            parts.append(f"arguments {argument_gib:.3f} GiB, temporaries {temp_mib:.1f} MiB ({', '.join(largest)})")
        return "; ".join(parts) or "unknown: the compiler gave no figures"


def compile_ahead(strategy: Strategy, device: hardware.Device, mesh: str, *, data: int = 1) -> Ahead:
    """Compile a strategy's donated loop for `mesh` of `device`, until its buffers are assigned.

    What comes after, code for every operation, takes most of the time and changes no buffer. Only a program
    that may be too large is compiled to the end: the compiler refuses it then, and says why.

    Raises:
      CompilerMissingError: with the extra that installs it.
      ValueError: a mesh that no such machine has.
      RuntimeError: the child process failed for another reason than memory, with the end of what it said.
    """
    check_installed(device)
    mesh = hardware.check_mesh(device, mesh)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        request = {"strategy": strategy.asdict(), "device": device.name, "mesh": mesh, "data": data, "folder": folder}
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "specjax.memory.aot_child", json.dumps(request)],
            env=_environment(device, mesh),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            figures = _wait(child, folder, device.limit_bytes)
            if figures is not None and child.poll() is None:
                return Ahead(figures, "", time.perf_counter() - begin)
            said, _ = child.communicate(timeout=TIMEOUT_S)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            log.seek(0)
            raise RuntimeError(f"compiling for {device.name} {mesh} failed:\n{log.read()[-1500:]}")
        return Ahead(read_dump(folder), json.loads(said.splitlines()[-1])["refusal"], time.perf_counter() - begin)


def compile_here(strategy: Strategy) -> Ahead:
    """Compile a strategy's donated loop for this process's first device, and run it once where that says its memory.

    Run strategies in ascending order of their bytes: a device knows the most that was ever held.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lowered = compiler.lower(*strategy.shapes(), **strategy.options())
        try:
            executable = lowered.compile(compiler_options=compiler.options() | dump_options(folder))
            seconds, figures = time.perf_counter() - begin, read_dump(folder)
            return Ahead(figures, "", seconds, measured_peak(executable, lowered.in_avals))
        except jax.errors.JaxRuntimeError as error:
            return Ahead(read_dump(folder), out_of_memory(error), time.perf_counter() - begin)


def _wait(child: subprocess.Popen[str], folder: str, limit_bytes: int) -> Assignment | None:
    """The assignment as soon as it is there and surely fits; `None` if the child must say more, or has ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while child.poll() is None and time.monotonic() < deadline:
        found = read_dump(folder)
        if found is not None:
            return found if found.total_bytes < limit_bytes - PROGRAM_BYTES else None
        time.sleep(0.1)
    return None


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
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # whoever else has it loaded, this process runs nothing on a TPU
            "LIBTPU_INIT_ARGS": LIBTPU_ARGS.get(device.name, ""),
        }
    else:
        spec = importlib.util.find_spec("nvidia.cu13")
        folders = spec.submodule_search_locations if spec else None
        variables["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={next(iter(folders or ()))}"
    return variables
