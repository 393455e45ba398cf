"""Launch of Mosaic GPU kernels, and a layer over the differences between versions of JAX.

A kernel's body is written once, in terms of a `Target`. On a GPU it sets the register layout of
arrays; in Pallas' plain interpreter, which runs anywhere, it does nothing.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import DTypeLike

from sharding.collectives import match_varying

LANES = 128
"""Threads of a warpgroup. Most programs are one warpgroup."""
THREAD = "warpgroup"
"""Axis of the warpgroups of a program that has several."""
LOADS_IN_FLIGHT = 4
"""Loads of a row that each thread has in flight."""


@cache
def mosaic_gpu() -> Any:
    """The Mosaic GPU module, imported at its first use: on a CPU the import would be the slowest
    part of starting up."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def _stores_by_name() -> bool:
    """True from jax 0.12 on: its function `store` allows stores that are not vectorised."""
    return hasattr(mosaic_gpu(), "store")


def _loads_take_no_index() -> bool:
    """True from jax 0.11 on: a load takes no index, and a reference has `transpose`."""
    return hasattr(mosaic_gpu(), "InterpretGPUParams")


class Target:
    """Operations of a kernel body that depend on the machine; here for interpreters, where arrays
    have no register layout."""

    def strided(self, value: jax.Array) -> jax.Array:
        """The same values in the strided layout: neighbouring elements in neighbouring threads."""
        return value

    def tiled(self, value: jax.Array, dimension: int = 0) -> jax.Array:
        """The same values in the layout of the matrix units: a matrix ``[64 m, 8 n]``, or a vector
        along a dimension of one."""
        return value

    def load(self, ref: Any, dimension: int | None = None) -> jax.Array:
        """Loads a matrix, or a vector along a dimension of one, in the layout of `tiled`."""
        return ref[...]

    def store(self, ref: Any, value: jax.Array) -> None:
        """Stores an array in the layout of `tiled`."""
        ref[...] = value

    def full(
        self, shape: tuple[int, ...], value: float | int, dtype: DTypeLike = jnp.float32
    ) -> Any:
        """An array of one number, in the layout of `tiled`, as in the next three."""
        return self.tiled(jnp.full(shape, value, dtype))

    def broadcast(self, vector: jax.Array, shape: tuple[int, ...], dimension: int = 0) -> Any:
        """A matrix with a number for each of its rows, or with dimension 1 for each column."""
        return self.tiled(lax.broadcast_in_dim(vector, shape, (dimension,)))

    def iota(self, shape: tuple[int, ...], dimension: int) -> Any:
        """The index along a dimension of each element of a matrix."""
        return self.tiled(lax.broadcasted_iota(jnp.int32, shape, dimension))

    def in_range(self, shape: tuple[int, ...], dimension: int, first: Any, stop: Any) -> Any:
        """True for the elements whose index along a dimension is in a range."""
        index = self.iota(shape, dimension)
        return (index >= first).astype(jnp.int32) * (index < stop).astype(jnp.int32) > 0

    def transpose(self, ref: Any) -> Any:
        """Transposed view of a matrix in shared memory."""
        if _loads_take_no_index():
            return ref.transpose((1, 0))
        return mosaic_gpu().transpose_ref(ref, (1, 0))

    def add_product(self, total: jax.Array, left: Any, right: Any) -> jax.Array:
        """``total + left @ right``, of matrices in shared memory; the left one may also be in
        registers."""
        # The simulator supports neither an accumulator that starts from other values than zeros nor
        # a product with an operand in registers.
        if isinstance(left, jax.Array):
            return total + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        return total + product(left, right)

    def registers(self, number: int, action: Literal["increase", "decrease"]) -> None:
        """Sets the number of registers of each thread of this warpgroup (`setmaxnreg`)."""


def product(left: Any, right: Any) -> jax.Array:
    """Product of two matrices in shared memory by the matrix units, float32 in registers."""

    def multiply(total):
        mosaic_gpu().wgmma(total, left, right)
        return total[...]

    shape = left.shape[0], right.shape[1]
    return pl.run_scoped(multiply, mosaic_gpu().WGMMAAccumulatorRef(shape))


class Gpu(Target):
    def strided(self, value: jax.Array) -> jax.Array:
        layout = mosaic_gpu().Layout.WG_STRIDED(value.shape, vec_size=value.shape[0] // LANES)
        return mosaic_gpu().layout_cast(value, layout)

    def tiled(self, value: jax.Array, dimension: int = 0) -> jax.Array:
        return mosaic_gpu().layout_cast(value, _tile(None if value.ndim == 2 else dimension))

    def load(self, ref: Any, dimension: int | None = None) -> jax.Array:
        index = () if _loads_take_no_index() else ((),)
        return mosaic_gpu().load(ref, *index, layout=_tile(dimension), optimized=False)

    def store(self, ref: Any, value: jax.Array) -> None:
        if _stores_by_name():
            mosaic_gpu().store(ref, value, optimized=False)
        else:
            ref[...] = value

    def add_product(self, total: jax.Array, left: Any, right: Any) -> jax.Array:
        def multiply(accumulator):
            mosaic_gpu().wgmma(accumulator, left, right)

        return pl.run_state(multiply)(mosaic_gpu().WGMMAAccumulatorRef.init(total))

    def registers(self, number: int, action: Literal["increase", "decrease"]) -> None:
        mosaic_gpu().set_max_registers(number, action=action)


def _tile(dimension: int | None) -> Any:
    tile = mosaic_gpu().Layout.WGMMA
    return tile if dimension is None else tile.reduce(1 - dimension)


def loop_over_row(width: int, bits: int, body: Callable[[list[tuple[Any, int]]], None]) -> None:
    """Runs ``body(chunks)`` along a row of `width` elements, a few chunks at a time.

    A chunk is ``(first, length)``. Its length is what a warpgroup moves with one 16-byte
    instruction per thread; near the end of the row it is `LANES` times a smaller power of two.
    """
    # Four loads in flight per thread hide the latency of memory.
    length = LANES * 128 // bits
    stride = length * LOADS_IN_FLIGHT

    def step(index, _):
        body([(index * stride + n * length, length) for n in range(LOADS_IN_FLIGHT)])

    strides, first, chunks = width // stride, width - width % stride, []
    if strides:
        lax.fori_loop(0, strides, step, None)
    while first < width:
        while length > width - first:
            length //= 2
        chunks.append((first, length))
        first += length
    if chunks:
        body(chunks)


def launch(
    body: Callable[..., None],
    programs: int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    *,
    operation: str,
    name: str | None = None,
    threads: int = 1,
    approximate: bool = False,
    interpreted: bool = False,
    simulated: bool = False,
) -> tuple[jax.Array, ...]:
    """Launches a kernel: ``body(target, program, *operands, *outputs)`` for each program.

    Args:
      body: reads and writes references to device memory.
      programs: size of the grid.
      outputs: shapes of the outputs; every element is written by one program.
      operation: named in the error.
      name: of the kernel in profiles and compiler reports; None is the operation.
      threads: warpgroups that run the body of a program, each with its index along `THREAD`.
      approximate: exponentials and logarithms by the GPU's instructions, to 22 bits.
      interpreted: by Pallas' plain interpreter, slow and on any device.
      simulated: by the interpreter that models a GPU's memories, barriers and matrix units; slower
        still. That of jax 0.10 does not support transposed references.

    Raises:
      ValueError: when it is lowered for anything but CUDA and not interpreted.
    """
    if interpreted:
        call = pl.pallas_call(
            lambda *refs: body(Target(), pl.program_id(0), *refs),
            out_shape=tuple(outputs),
            grid=(programs,),
            interpret=True,
        )
        return call(*operands)
    # A kernel's result varies over the mesh axes of all its operands, which are typed alike here.
    first, *others = match_varying(tuple(operands))
    target = Target() if simulated else Gpu()
    plgpu, warpgroup_options = mosaic_gpu(), {}
    if threads > 1:
        warpgroup_options = {"num_threads": threads, "thread_name": THREAD}

    def run_body(*refs: Any) -> None:
        body(target, lax.axis_index("program"), *refs)

    # The compiler names a kernel after its function.
    run_body.__name__ = operation if name is None else name
    kernel = plgpu.kernel(
        run_body,
        out_type=tuple(outputs),
        grid=(programs,),
        grid_names=("program",),
        **warpgroup_options,
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Scratch memory for sums over warps: concurrent warpgroups would share it and race.
            **({"reduction_scratch_bytes": 0} if warpgroup_options else {}),
        ),
        interpret=_simulator() if simulated else None,
    )
    first = first if simulated else require_cuda(first, operation)
    return match_varying(tuple(kernel(first, *others)), first)


def _simulator() -> Any:
    # Copies from past the end of an array are NaN here, so that tests notice a use of them; a GPU's
    # copy engine gives zeros.
    beyond = {"out_of_bounds_reads": "uninitialized"}
    # It has a public name from jax 0.11 on.
    if hasattr(mosaic_gpu(), "InterpretGPUParams"):
        return mosaic_gpu().InterpretGPUParams(**beyond)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(**beyond)  # pyright: ignore


def require_cuda(x: jax.Array, operation: str) -> jax.Array:
    """Returns `x`; raises when it is lowered for another platform than CUDA."""
    return _require_cuda.bind(x, operation=operation)


def _reject(context, x, *, operation):
    platforms = ", ".join(context.module_context.platforms)
    raise ValueError(
        f'implementation="mosaic" of {operation} runs on NVIDIA GPUs (Hopper or later), but the '
        f'program is lowered for {platforms}: use "plain", or None for the best that applies.'
    )


_require_cuda = Primitive("needs_cuda")
_require_cuda.def_abstract_eval(lambda x, *, operation: x)
_require_cuda.def_impl(
    lambda x, *, operation: jax.jit(require_cuda, static_argnums=1)(x, operation)
)
mlir.register_lowering(_require_cuda, _reject)
mlir.register_lowering(_require_cuda, lambda context, x, *, operation: [x], platform="cuda")
