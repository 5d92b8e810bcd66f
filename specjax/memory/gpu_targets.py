"""GPUs as XLA's compiler must know them when they are not there: sizes as data, written as a target-config proto.

Figures are what each GPU's driver reports, as openxla/xla keeps them in `xla/backends/gpu/target_config/specs`
(`h100_sxm`, `h200`, `b200`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuTarget:
    """One GPU. `memory_bytes` is what its driver reports: more than the maker's gigabytes, less than its chips."""

    description: str
    capability: int  # major compute capability; the minor one is 0 for all of these
    cores: int
    fpus_per_core: int
    memory_bytes: int
    bandwidth_bytes_per_s: int
    l2_bytes: int
    clock_ghz: float
    shared_bytes: int  # a core
    shared_optin_bytes: int  # a block

    @property
    def proto(self) -> str:
        """XLA's `GpuTargetConfigProto`, as text."""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block_optin: {self.shared_optin_bytes}
  core_count: {self.cores} fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth_bytes_per_s} l2_cache_size: {self.l2_bytes}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {self.capability} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} runtime_version {{ major: 13 }}
device_description_str: "{self.description}" """


GPU_TARGETS: dict[str, GpuTarget] = {
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", 9, 132, 128, 84_942_979_072, 3_352_320_000_000, 52_428_800, 1.98,
                      233_472, 232_448),
    "h200": GpuTarget("NVIDIA H200 141GB HBM3e", 9, 132, 128, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98,
                      233_472, 232_448),
    "b200": GpuTarget("NVIDIA B200", 10, 148, 128, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965,
                      233_472, 232_448),
}  # fmt: skip
