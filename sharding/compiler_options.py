"""What XLA is asked for when a program of several devices is compiled.

Options go with the `jax.jit` that needs them and are part of what is compiled; the environment
(``XLA_FLAGS``) is the user's, and an option there holds for whatever is not said here. A name that
a compiler does not know is refused when a program is compiled: every name here is known to all
versions of jaxlib that the package runs on (`tests/sharding/test_compiler_options.py`).
"""

from sharding.folding import FoldedMesh

Options = dict[str, bool | int | str]

BY_PLATFORM: dict[str, Options] = {
    # Collectives begin as early and end as late as what they wait for and what waits for them
    # allows, beside other work. That they are asynchronous is XLA's default.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
"""Options for more than one device; a CPU runs its collectives one by one, and a TPU's compiler
schedules around them by itself."""


LEAST_EFFORT: dict[str, Options] = {
    "cpu": {"xla_backend_optimization_level": 0},
}
"""Options for a program that runs so seldom and on so little that compiling it is most of its cost:
a CPU's compiler takes half of the time, and what it makes two or three times as long."""


def compiler_options(mesh: FoldedMesh, *, least_effort: bool = False) -> Options:
    """The ``compiler_options`` of `jax.jit` for a program of that mesh; on a single device, which
    has no communication to hide, none but for a `LEAST_EFFORT`.

    References:
      NVIDIA, "Tips for High-Performance LLMs with JAX and XLA".
      https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance
    """
    if mesh.platform is None:
        return {}
    least = LEAST_EFFORT.get(mesh.platform, {}) if least_effort else {}
    hides = {} if mesh.layout.num_devices == 1 else BY_PLATFORM.get(mesh.platform, {})
    return {**hides, **least}
