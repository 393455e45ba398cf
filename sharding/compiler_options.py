"""XLA compiler options of multi-device programs.

Options are passed to the `jax.jit` that needs them (`sharding.sharded_jit`) and are part of the
compilation key; the environment (``XLA_FLAGS``) is the user's, and applies to all options that are
not set here. An unknown name is an error at compilation: every name here is known to the installed
jaxlib (`tests/sharding/test_compiler_options.py`).
"""

import re
from collections.abc import Collection
from importlib.metadata import version
from typing import Any

from sharding.folding import FoldedMesh

Options = dict[str, bool | int | str]

# Releases before a final one have a suffix, such as 0.12.0rc1.
JAXLIB = tuple(map(int, re.findall(r"\d+", version("jaxlib"))[:3]))
REQUIRED: dict[str, Options] = {
    # An empty list of kernels. With that of all-reduces, the compiler of jaxlib 0.12.0.1 aborts
    # the process for a sum of few elements over groups of 64 devices. Not known before 0.11.2.
    "gpu": {"xla_gpu_experimental_use_collective_kernels": ""} if JAXLIB >= (0, 11, 2) else {},
}
"""Options of all programs of more than one device."""

OVERLAP: dict[str, Options] = {
    # Collectives start as early and end as late as their dependencies allow, overlapped with other
    # work. That they are asynchronous is XLA's default.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
"""Options for more than one device of passes over many tokens. In a decoding step there is nothing
to overlap with: each layer's communication waits for its attention. A CPU runs its collectives one
by one. The compiler of a TPU v5p makes ragged all-to-alls asynchronous by default, and no others
(libtpu 0.0.52)."""


LEAST_EFFORT: dict[str, Options] = {
    "cpu": {"xla_backend_optimization_level": 0},
}
"""Options of a rare and small program, whose compilation costs more than its runs: a CPU's compiler
takes half of the time, and the program runs two or three times as long."""


def compiler_options(
    mesh: FoldedMesh, *, overlap: bool = True, least_effort: bool = False
) -> Options:
    """The ``compiler_options`` of `jax.jit` for a program of that mesh.

    It is empty for a single device, which has no communication to hide, unless `LEAST_EFFORT` is
    requested, and for an abstract mesh.

    Args:
      overlap: of `OVERLAP`.
      least_effort: of `LEAST_EFFORT`.

    References:
      NVIDIA, "Tips for High-Performance LLMs with JAX and XLA".
      https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance
    """
    if mesh.platform is None:
        return {}
    least = LEAST_EFFORT.get(mesh.platform, {}) if least_effort else {}
    if mesh.layout.num_devices == 1:
        return {**least}
    hides = OVERLAP.get(mesh.platform, {}) if overlap else {}
    return {**REQUIRED.get(mesh.platform, {}), **hides, **least}


def device_options(devices: Collection[Any]) -> Options:
    """The ``compiler_options`` of `jax.jit` for a program of these devices that overlaps nothing.

    Args:
      devices: of JAX, such as `jax.sharding.Sharding.device_set`.
    """
    platform = next((device.platform for device in devices), "")
    return {**REQUIRED.get(platform, {})} if len(devices) > 1 else {}
