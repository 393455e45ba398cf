"""XLA compiler options of multi-device programs.

Options are passed to the `jax.jit` that needs them and are part of the compilation key; the
environment (``XLA_FLAGS``) is the user's, and applies to all options that are not set here. An
unknown name is an error at compilation: every name here is known to all versions of jaxlib that
the package supports (`tests/sharding/test_compiler_options.py`).
"""

from sharding.folding import FoldedMesh

Options = dict[str, bool | int | str]

BY_PLATFORM: dict[str, Options] = {
    # Collectives start as early and end as late as their dependencies allow, overlapped with other
    # work. That they are asynchronous is XLA's default.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
"""Options for more than one device. A CPU runs its collectives one by one. The compiler of a TPU
v5p makes ragged all-to-alls asynchronous by default, and no others (libtpu 0.0.52)."""


LEAST_EFFORT: dict[str, Options] = {
    "cpu": {"xla_backend_optimization_level": 0},
}
"""Options of a rare and small program, whose compilation costs more than its runs: a CPU's compiler
takes half of the time, and the program runs two or three times as long."""


def compiler_options(mesh: FoldedMesh, *, least_effort: bool = False) -> Options:
    """The ``compiler_options`` of `jax.jit` for a program of that mesh.

    It is empty for a single device, which has no communication to hide, unless `LEAST_EFFORT` is
    requested, and for an abstract mesh.

    References:
      NVIDIA, "Tips for High-Performance LLMs with JAX and XLA".
      https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance
    """
    if mesh.platform is None:
        return {}
    least = LEAST_EFFORT.get(mesh.platform, {}) if least_effort else {}
    hides = {} if mesh.layout.num_devices == 1 else BY_PLATFORM.get(mesh.platform, {})
    return {**hides, **least}
