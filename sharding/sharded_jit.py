"""Compiled functions of several devices: with the compiler options of their mesh or devices
(`compiler_options`), and with results that are trees of sharded arrays.

Options are passed to the `jax.jit` that needs them and are part of the compilation key; the
environment (``XLA_FLAGS``) is the user's, and applies to all options that are not set here. An
unknown name is an error at compilation: every name here is known to the installed jaxlib
(`tests/sharding/test_compiler_options.py`).
"""

import re
import time
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Executor, Future
from importlib.metadata import version
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from sharding.folding import FoldedMesh

Options = dict[str, bool | int | str]

# Releases before a final one have a suffix, for example 0.12.0rc1.
JAXLIB = tuple(map(int, re.findall(r"\d+", version("jaxlib"))[:3]))
REQUIRED: dict[str, Options] = {
    # An empty list of kernels. With the kernel of all-reduces, the compiler of jaxlib 0.12.0.1
    # aborts the process for a sum of few elements over groups of 64 devices. Not known before
    # 0.11.2.
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

ONE_GRAPH: dict[str, Options] = {
    # XLA's default kinds of commands, without collectives, and WHILE.
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    },
}
"""Options of a program that is a loop of many short kernels, such as the window of decode steps: a
GPU runs the loop as one CUDA graph, and the host launches no iteration. By default XLA makes a
graph of an iteration at most."""

LEAST_EFFORT: dict[str, Options] = {"cpu": {"xla_backend_optimization_level": 0}}
"""Options of a rare and small program, whose compilation costs more than its runs: a CPU's compiler
takes half of the time, and the program runs two or three times as long."""

AWAITED = "/sharding/compile_ahead/awaited"
"""JAX monitoring event of a call that begins to wait for a program that a thread compiles."""
READY = "/sharding/compile_ahead/ready_duration"
"""JAX monitoring event of its end, with the seconds waited."""

Params = ParamSpec("Params")
Result = TypeVar("Result")


def compiler_options(
    mesh: FoldedMesh, *, overlap: bool = True, least_effort: bool = False, one_graph: bool = False
) -> Options:
    """The ``compiler_options`` of `jax.jit` for a program of that mesh.

    It is empty for a single device without communication to hide, unless `LEAST_EFFORT` or
    `ONE_GRAPH` is requested, and for an abstract mesh.

    Args:
      overlap: value of `OVERLAP`.
      least_effort: value of `LEAST_EFFORT`.
      one_graph: value of `ONE_GRAPH`.

    References:
      NVIDIA, "Tips for High-Performance LLMs with JAX and XLA".
      https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance
    """
    if mesh.platform is None:
        return {}
    least = LEAST_EFFORT.get(mesh.platform, {}) if least_effort else {}
    least = {**least, **(ONE_GRAPH.get(mesh.platform, {}) if one_graph else {})}
    if mesh.layout.num_devices == 1:
        return least
    hides = OVERLAP.get(mesh.platform, {}) if overlap else {}
    return {**REQUIRED.get(mesh.platform, {}), **hides, **least}


def device_options(devices: Collection[Any]) -> Options:
    """The ``compiler_options`` of `jax.jit` for a program of these devices that overlaps nothing.

    Args:
      devices: JAX devices, for example `jax.sharding.Sharding.device_set`.
    """
    platform = next((device.platform for device in devices), "")
    return {**REQUIRED.get(platform, {})} if len(devices) > 1 else {}


class DeviceJit(Generic[Params, Result]):
    """Jitted function with the compiler options of its devices
    (`sharding.sharded_jit.device_options`).

    Args:
      function: function of arrays.
      devices: devices of the program; None is the devices of the first array among the arguments.
      options: options of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[Params, Result],
        *,
        devices: Collection[Any] | None = None,
        **options: Any,
    ):
        self._function, self._devices, self._options = function, devices, options
        self._jitted: dict[tuple[tuple[str, Any], ...], Any] = {}
        self._ahead: dict[Hashable, Future[Any]] = {}
        self.__doc__ = function.__doc__

    def settings_of(self, args: tuple[Any, ...]) -> Options:
        """Compiler options for these arguments."""
        devices = self._devices
        if devices is None:
            arrays = (leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))
            devices = next((array.sharding.device_set for array in arrays), ())
        return device_options(devices)

    def jit_with(self, settings: Options) -> Any:
        """Jitted function with compiler options; the same for equal ones."""
        # Options belong to `jax.jit` and not to a call, so there is one function for each set.
        key = tuple(sorted(settings.items()))
        if key not in self._jitted:
            self._jitted[key] = jax.jit(
                self._function, compiler_options=settings or None, **self._options
            )
        return self._jitted[key]

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        if self._ahead:
            self._wait_for_program(args, kwargs)
        return self._jit_of(args)(*args, **kwargs)

    def compile_ahead(self, executor: Executor, *args: Any) -> "Future[Any]":
        """Compiles a program in a thread of `executor`, before its first call.

        The call waits for it and runs it, and raises the error of the compilation. A compilation
        that has not begun by then is cancelled: the call compiles the program itself. The same for
        a call with other arguments.

        Args:
          args: the arguments, with a `jax.ShapeDtypeStruct` with a sharding for each array.
        """
        key, lower = _signature(args, {}), self._jit_of(args).lower
        if key not in self._ahead:
            # The first call of the jitted function finds trace and executable in its caches.
            self._ahead[key] = executor.submit(lambda: lower(*args).compile())
        return self._ahead[key]

    def forget_ahead(self) -> None:
        """Forgets the programs of `compile_ahead` that were not called."""
        self._ahead.clear()

    def _wait_for_program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        future = self._ahead.pop(_signature(args, kwargs), None)
        if future is None or future.cancel():
            return
        name, begin = f"jit({getattr(self._function, '__name__', '')})", time.monotonic()
        jax.monitoring.record_event_duration_secs(AWAITED, 0.0, fun_name=name)
        future.result()
        seconds = time.monotonic() - begin
        jax.monitoring.record_event_duration_secs(READY, seconds, fun_name=name)

    def lower(self, *args: Params.args, **kwargs: Params.kwargs) -> Any:
        """Lowers the function, as `jax.jit`'s `lower`."""
        return self._jit_of(args).lower(*args, **kwargs)

    def trace(self, *args: Params.args, **kwargs: Params.kwargs) -> Any:
        """Traces the function, as `jax.jit`'s `trace`."""
        return self._jit_of(args).trace(*args, **kwargs)

    def cache_size(self) -> int:
        """Number of programs that were traced."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def _jit_of(self, args: tuple[Any, ...]) -> Any:
        # Traced as a part of another program, it has the options of that one.
        is_part = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        return self.jit_with({} if is_part else self.settings_of(args))


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Structure of arguments, static ones, and shape, dtype and placement of arrays."""

    def describe(leaf: Any) -> Hashable:
        if isinstance(leaf, Tracer):
            return type(leaf)
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            # Of each device, as JAX compares shardings: P("tp") is P() on an axis of one device.
            parts = leaf.sharding.devices_indices_map(leaf.shape)
            placement = tuple((device.id, str(part)) for device, part in parts.items())
            return leaf.shape, leaf.dtype, leaf.weak_type, placement
        return leaf if isinstance(leaf, Hashable) else type(leaf)

    leaves, structure = jax.tree.flatten((args, kwargs))
    return structure, tuple(map(describe, leaves))


class MeshJit(DeviceJit[Params, Result]):
    """Jitted function of an objective, a decoder or another record, whose mesh determines the
    compiler options (`sharding.sharded_jit.compiler_options`).

    Args:
      function: its first argument is static and has a `mesh`.
      mesh_of: the mesh of the first argument; None is its `mesh`.
      overlap: it is a pass over many tokens, see `sharding.sharded_jit.OVERLAP`; not if `overlaps`
        of the first argument is False.
      least_effort: effort of the compiler, see `sharding.sharded_jit.LEAST_EFFORT`.
      one_graph: it is a loop of short kernels, see `sharding.sharded_jit.ONE_GRAPH`.
      options: options of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[Params, Result],
        *,
        mesh_of: Callable[[Any], FoldedMesh] | None = None,
        overlap: bool = True,
        least_effort: bool = False,
        one_graph: bool = False,
        **options: Any,
    ):
        super().__init__(function, **options)
        self._mesh_of = mesh_of or (lambda record: record.mesh)
        self._flags = {"overlap": overlap, "least_effort": least_effort, "one_graph": one_graph}

    def settings_of(self, args: tuple[Any, ...]) -> Options:
        """Compiler options for these arguments."""
        overlap = self._flags["overlap"] and getattr(args[0], "overlaps", True)
        return compiler_options(self._mesh_of(args[0]), **{**self._flags, "overlap": overlap})

    def jit_for(self, mesh: FoldedMesh) -> Any:
        """Jitted function for a mesh; the same for meshes with the same options."""
        return self.jit_with(compiler_options(mesh, **self._flags))


def jit_onto(
    function: Callable[Params, Result], shardings: Any, **options: Any
) -> DeviceJit[Params, Result]:
    """Jitted function with the shardings of its results, and the compiler options of their devices.

    Args:
      shardings: a tree, all over the same devices.
      options: options of `jax.jit`.
    """
    devices = next((one.device_set for one in jax.tree.leaves(shardings)), ())
    return DeviceJit(function, devices=devices, out_shardings=shardings, **options)


def jit_sharded(build: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Compiles `build`, with its result sharded by `shardings`, a tree of the same structure.

    The compiled function itself returns a list: for fields that are None JAX would insert a marker,
    which a dataclass cannot hold.
    """
    leaf_shardings, structure = jax.tree.flatten(shardings)

    def create(*args: Any) -> list[Any]:
        return jax.tree.leaves(build(*args))

    compiled = jit_onto(create, leaf_shardings)
    return lambda *args: structure.unflatten(compiled(*args))


def named_shardings(partition_specs: Any, mesh: FoldedMesh) -> Any:
    """NamedSharding of each PartitionSpec of a tree, on the devices of `mesh`.

    Raises:
      ValueError: for a mesh without devices.
    """
    if not isinstance(mesh.mesh, jax.sharding.Mesh):
        raise ValueError("shardings need real devices: use fold instead of fold_abstract.")
    return jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), partition_specs)


def abstract_array(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
