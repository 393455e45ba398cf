"""Descriptions of accelerators: what a compiler needs to know of a device, and published rates."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """An NVIDIA GPU.

    Attributes:
      name: as its driver reports it.
      capability: compute capability, major and minor.
      multiprocessors: number of them.
      clock: of the multiprocessors, GHz.
      memory: bytes of device memory that programs may use.
      bandwidth: bytes/s of device memory.
      l2: bytes of the L2 cache.
      peak: FLOP/s of dense products of bfloat16.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    memory: int
    bandwidth: float
    l2: int
    peak: float


class Tpu(NamedTuple):
    """A generation of TPUs.

    Attributes:
      topology: the smallest one that the compiler accepts with eight devices.
      memory: bytes of HBM of a chip.
      bandwidth: bytes/s of HBM.
      peak: FLOP/s of dense products of bfloat16 of a chip.
    """

    topology: str
    memory: int
    bandwidth: float
    peak: float


GPUS = {
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 84942979072, 3352.32e9, 52428800, 989.5e12)
    ),
    "h200": Gpu(
        *("NVIDIA H200 141GB HBM3e", (9, 0), 132, 1.98, 151397597184, 4800e9, 52428800, 989.5e12)
    ),
    "b200": Gpu(*("NVIDIA B200", (10, 0), 148, 1.965, 191514411008, 7672.32e9, 132644864, 2250e12)),
    "gb200": Gpu(
        *("NVIDIA GB200", (10, 0), 152, 2.062, 197897748480, 7928.064e9, 135528448, 2500e12)
    ),
}
"""Figures that drivers report of these devices, as XLA's repository records them in
``xla/backends/gpu/target_config/specs``; peaks are those of NVIDIA's datasheets."""

GIB = 2**30
TPUS = {
    "v5e": Tpu("v5e:2x4", 16 * GIB, 819e9, 197e12),
    "v5p": Tpu("v5p:2x2x2", 95 * GIB, 2765e9, 459e12),
    "v6e": Tpu("v6e:2x4", 32 * GIB, 1640e9, 918e12),
}
"""Google Cloud's documentation of each generation (https://cloud.google.com/tpu/docs/system-architecture-tpu-vm)."""

# The same on Hopper and Blackwell: NVIDIA, "CUDA Programming Guide", table of compute capabilities.
REGISTERS = 65536
"""Registers of a multiprocessor."""
SHARED_MEMORY = 233472
"""Bytes of shared memory of a multiprocessor."""
SHARED_MEMORY_OF_BLOCK = 232448
"""Bytes of shared memory that one thread block may ask for."""
RESERVED = 1024
"""Bytes of shared memory that the driver takes of each thread block."""
THREADS = 2048
"""Threads of a multiprocessor, at most."""


def target_config(gpu: Gpu) -> str:
    """The description that XLA compiles for, a `GpuTargetConfigProto` in text."""
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {SHARED_MEMORY}
  shared_memory_per_block_optin: {SHARED_MEMORY_OF_BLOCK}
  threads_per_core_limit: {THREADS}
  core_count: {gpu.multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: {REGISTERS}
  registers_per_block_limit: {REGISTERS}
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: ACCELERATED_FEATURES
  }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}a"
  device_address_bits: 64
  name: "{gpu.name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
