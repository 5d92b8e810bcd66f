"""Devices as data: sizes and rates, each with its source.

Rates are peaks per device as the maker states them, dense, without sparsity. A TPU v4 or v7 chip shows
its two cores as two devices, each with half of the chip's memory and rates: entries are per device, as
the program sees it. `usable_bytes` is what the device's compiler lets a program have, read from its own
refusal of a larger one (libtpu 0.0.52); where there is no such figure it is `None`, and all of
`hbm_bytes` is taken, which is too much by what the runtime keeps for itself. `this` is the machine that the
program runs on, measured (`specjax.memory.measured_device`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specjax import mesh as meshes
from specjax.model import ModelConfig

GB, GiB = 10**9, 2**30
HERE = "this"


PCIE4, PCIE5 = 32e9, 64e9
"""16 lanes, one direction, before protocol overhead: PCI-SIG base specifications 4.0 and 5.0."""
NVME_BYTES_PER_S = 7e9
"""A PCIe 4.0 x4 drive, sequential reading: 8 GB/s of the link less overhead (a default, not a measurement)."""
TPU_HOST, TPU_V6_HOST = 15e9, 32e9
"""A chip to its host: jax-ml.github.io/scaling-book/tpus, "PCIe bandwidth is typically around 1.5e10 bytes/s a chip;
Trillium has 32 GB/s"."""


@dataclass(frozen=True)
class Device:
    """One accelerator. `None` is unknown."""

    name: str
    platform: str  # "tpu" or "gpu"
    hbm_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flop_per_s: float
    fp8_flop_per_s: float | None
    link_bytes_per_s: float | None  # to its neighbours, all links together, one direction
    source: str
    usable_bytes: int | None = None
    topology: str | None = None  # the ahead-of-time compiler's name
    devices_per_chip: int = 1
    host_bytes_per_s: float | None = None  # to host memory, one direction
    nvme_bytes_per_s: float | None = NVME_BYTES_PER_S  # a default, the machine's own to choose

    @property
    def limit_bytes(self) -> int:
        """What a program may use."""
        return self.usable_bytes or self.hbm_bytes

    @property
    def limit_source(self) -> str:
        """What the limit rests on, and what it leaves out."""
        if self.name == HERE:
            return "what this machine has free now"
        if self.usable_bytes:
            kept = (self.hbm_bytes - self.usable_bytes) / GiB
            return f"what its compiler allows: {kept:.2f} GiB are kept by the runtime"
        return "all of its memory; JAX takes 75 % of it unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"


_TPU = "cloud.google.com/tpu/docs/"
_SCALING = "; jax-ml.github.io/scaling-book/tpus (bandwidths)"
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("tpu-v4", "tpu", 16 * GiB, 0.6e12, 137.5e12, None, 135e9, _TPU + "v4" + _SCALING,
               int(15.25 * GiB), "v4", 2, TPU_HOST / 2),
        Device("tpu-v5e", "tpu", 16 * GiB, 0.819e12, 197e12, None, 180e9, _TPU + "v5e" + _SCALING,
               int(15.75 * GiB), "v5e", 1, TPU_HOST),
        Device("tpu-v5p", "tpu", 96 * GiB, 2.765e12, 459e12, 459e12, 540e9, _TPU + "v5p" + _SCALING,
               int(95.73 * GiB), "v5p", 1, TPU_HOST),
        Device("tpu-v6e", "tpu", 32 * GiB, 1.638e12, 918e12, 918e12, 360e9, _TPU + "v6e" + _SCALING,
               int(31.24 * GiB), "v6e", 1, TPU_V6_HOST),
        Device("tpu-v7", "tpu", 96 * GiB, 3.69e12, 1153.5e12, 2307e12, 300e9, _TPU + "tpu7x",
               int(94.74 * GiB), "tpu7x", 2),
        Device("a100", "gpu", 80 * GB, 2.039e12, 312e12, None, 300e9,
               "NVIDIA A100 datasheet, SXM 80 GB", host_bytes_per_s=PCIE4),
        Device("h100", "gpu", 80 * GB, 3.35e12, 989e12, 1979e12, 450e9,
               "NVIDIA H100 datasheet, SXM", topology="h100", host_bytes_per_s=PCIE5),
        Device("h200", "gpu", 141 * GB, 4.8e12, 989e12, 1979e12, 450e9,
               "NVIDIA H200 datasheet, SXM", topology="h200", host_bytes_per_s=PCIE5),
        Device("b200", "gpu", 180 * GB, 8.0e12, 2250e12, 4500e12, 900e9,
               "NVIDIA DGX B200 datasheet, an eighth of it", topology="b200", host_bytes_per_s=PCIE5),
        Device("mi300x", "gpu", 192 * GB, 5.3e12, 1307e12, 2615e12, 448e9,
               "AMD Instinct MI300X datasheet", host_bytes_per_s=PCIE5),
        Device("mi355x", "gpu", 288 * GB, 8.0e12, 2500e12, 5000e12, 538e9,
               "AMD Instinct MI355X datasheet", host_bytes_per_s=PCIE5),
        Device("rtx-4090", "gpu", 24 * GiB, 1.008e12, 165.2e12, 330.3e12, None,
               "NVIDIA Ada GPU architecture whitepaper, appendix A", host_bytes_per_s=PCIE4),
    )
}  # fmt: skip


def find(name: str) -> Device:
    """The device of that name.

    Raises:
      ValueError: an unknown name, with the known ones.
    """
    if name == HERE:
        from specjax.memory import measured_device  # measures for a second or two

        return measured_device.measure()
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}: choose from {', '.join((*DEVICES, HERE))}")
    return DEVICES[name]


def place(name: str, mesh: str, data: int, config: ModelConfig, batch: int = 0) -> tuple[Device, meshes.Layout]:
    """A device by its name, and how a mesh of it splits a model, with `batch` rows where that is known.

    Raises:
      ValueError: an unknown device; a mesh that it is not built in, or that does not split the model or the rows.
    """
    device = find(name)
    check_mesh(device, mesh)
    layout = meshes.split(chips(mesh) * device.devices_per_chip, config.num_kv_heads, data=data)
    if not layout.splits(config.intermediate_size):
        raise ValueError(
            f"mesh of {layout.devices} devices: the {layout.parts(meshes.MODEL)} that share a model do not divide its "
            f"{config.intermediate_size} features, so that each would hold all of them: take a number that does, or "
            "whole copies with --data"
        )
    if batch % data:
        raise ValueError(f"batch={batch}: must be a multiple of data={data}, so that rows can be split")
    return device, layout


FLAT = ("tpu-v5e", "tpu-v6e")
"""TPUs in a two-dimensional torus."""


def check_mesh(device: Device, mesh: str) -> str:
    """A mesh as the device's maker writes it: TPUs have hosts of 2 x 2 chips in two or three dimensions, or parts.

    Raises:
      ValueError: the device is not built in such meshes, with the rule.
    """
    count = chips(mesh)
    if device.name == HERE and count > 1:
        raise ValueError(f"mesh {mesh!r}: this machine is measured as one device, give --mesh 1")
    if device.platform != "tpu" or device.name == HERE:
        return str(count)
    dimensions = 2 if device.name in FLAT else 3
    sizes = [1] * dimensions if count == 1 else [int(size) for size in mesh.lower().split("x")]
    if len(sizes) != dimensions or any(size > 1 and size % 2 for size in sizes[:2]):
        example = "x".join(["2"] * dimensions)
        raise ValueError(
            f"mesh {mesh!r}: {device.name} has {dimensions} dimensions, the first two 1 or even, as {example}"
        )
    return "x".join(map(str, sizes))


def chips(mesh: str) -> int:
    """Chips of a mesh such as `2x2x2`, a TPU's physical shape or, for GPUs, a plain number.

    Raises:
      ValueError: what is not positive numbers joined by x.
    """
    parts = mesh.lower().split("x")
    sizes = [int(part) if part.isdecimal() and part.isascii() and len(part) < 7 else 0 for part in parts]
    if min(sizes) < 1:
        raise ValueError(f"mesh {mesh!r}: give positive sizes joined by x, as 2x2x2")
    return math.prod(sizes)
