"""What is written differently for Mosaic GPU in different versions of JAX, and how a kernel starts.

A kernel's body is written once, in terms of a `Target`: on a GPU that places numbers in registers,
in Pallas' plain interpreter, which runs anywhere, it does nothing.
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

from sharding.collectives import vary, varying

LANES = 128
"""Threads of a warpgroup, of which most programs are run by one."""
THREAD = "warpgroup"
"""The axis of a program's warpgroups, where it has several."""
TOGETHER = 4
"""Parts of a row that each thread has on their way at a time."""


@cache
def mosaic_gpu() -> Any:
    """The back end, imported when it is first used: that takes longer than all else on a CPU."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def _stores_by_name() -> bool:
    """A store that need not be a wide one has a name: so from jax 0.12 on."""
    return hasattr(mosaic_gpu(), "store")


def _references_are_whole() -> bool:
    """A load takes no index beside the reference, which transposes itself: so from jax 0.11 on."""
    return hasattr(mosaic_gpu(), "InterpretGPUParams")


class Target:
    """What a body asks of the machine, here the interpreter, where no number has a place."""

    def strided(self, value: jax.Array) -> jax.Array:
        """The same, neighbouring numbers spread over neighbouring threads."""
        return value

    def tiled(self, value: jax.Array, dimension: int = 0) -> jax.Array:
        """The same: a matrix as the matrix units hold it, ``[64 m, 8 n]``, or a vector along a
        dimension of one."""
        return value

    def load(self, ref: Any, dimension: int | None = None) -> jax.Array:
        """A matrix as in `tiled`, or a vector along that dimension of one."""
        return ref[...]

    def store(self, ref: Any, value: jax.Array) -> None:
        """The reverse of `load`."""
        ref[...] = value

    def transposed(self, ref: Any) -> Any:
        """A matrix in shared memory, read along its columns."""
        if _references_are_whole():
            return ref.transpose((1, 0))
        return mosaic_gpu().transpose_ref(ref, (1, 0))

    def added(self, total: jax.Array, left: Any, right: Any) -> jax.Array:
        """``total + left @ right``, of matrices in shared memory; the left one may be in registers
        as well."""
        # The simulator knows no accumulator that begins with anything but zeros, and no product of
        # registers.
        if isinstance(left, jax.Array):
            return total + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        return total + product(left, right)

    def registers(self, number: int, action: Literal["increase", "decrease"]) -> None:
        """Gives each thread of this warpgroup so many, of those that others have left."""


def product(left: Any, right: Any) -> jax.Array:
    """Of matrices in shared memory, by the matrix units."""

    def multiplied(total):
        mosaic_gpu().wgmma(total, left, right)
        return total[...]

    shape = left.shape[0], right.shape[1]
    return pl.run_scoped(multiplied, mosaic_gpu().WGMMAAccumulatorRef(shape))


class Gpu(Target):
    def strided(self, value: jax.Array) -> jax.Array:
        layout = mosaic_gpu().Layout.WG_STRIDED(value.shape, vec_size=value.shape[0] // LANES)
        return mosaic_gpu().layout_cast(value, layout)

    def tiled(self, value: jax.Array, dimension: int = 0) -> jax.Array:
        return mosaic_gpu().layout_cast(value, _tile(None if value.ndim == 2 else dimension))

    def load(self, ref: Any, dimension: int | None = None) -> jax.Array:
        index = () if _references_are_whole() else ((),)
        return mosaic_gpu().load(ref, *index, layout=_tile(dimension), optimized=False)

    def store(self, ref: Any, value: jax.Array) -> None:
        if _stores_by_name():
            mosaic_gpu().store(ref, value, optimized=False)
        else:
            ref[...] = value

    def added(self, total: jax.Array, left: Any, right: Any) -> jax.Array:
        def multiplied(accumulator):
            mosaic_gpu().wgmma(accumulator, left, right)

        return pl.run_state(multiplied)(mosaic_gpu().WGMMAAccumulatorRef.init(total))

    def registers(self, number: int, action: Literal["increase", "decrease"]) -> None:
        mosaic_gpu().set_max_registers(number, action=action)


def _tile(dimension: int | None) -> Any:
    tile = mosaic_gpu().Layout.WGMMA
    return tile if dimension is None else tile.reduce(1 - dimension)


def along(width: int, bits: int, body: Callable[..., Any], carry: Any = None) -> Any:
    """``carry = body(parts, carry)`` along a row of `width` numbers, some parts of it at a time.

    A part is ``(first, length)``; it is as long as the threads of a warpgroup move with one
    instruction of 16 bytes each, near the end `LANES` times a smaller power of two.
    """
    length = LANES * 128 // bits
    stride = length * TOGETHER

    def step(index, carry):
        return body([(index * stride + n * length, length) for n in range(TOGETHER)], carry)

    strides, first, parts = width // stride, width - width % stride, []
    if strides:
        carry = lax.fori_loop(0, strides, step, carry)
    while first < width:
        while length > width - first:
            length //= 2
        parts.append((first, length))
        first += length
    return body(parts, carry) if parts else carry


def launch(
    body: Callable[..., None],
    programs: int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    *,
    operation: str,
    threads: int = 1,
    approximate: bool = False,
    interpreted: bool = False,
    simulated: bool = False,
) -> tuple[jax.Array, ...]:
    """Runs ``body(target, program, *operands, *outputs)`` for each of that many programs.

    Args:
      body: reads and writes references to device memory.
      outputs: what the programs write, every element by one of them.
      operation: named in the error.
      threads: warpgroups that run the body of a program, each with its number along `THREAD`.
      approximate: powers and logarithms by the GPU's instructions, to 22 bits.
      interpreted: by Pallas' plain interpreter, slow and on any device.
      simulated: by the interpreter that knows a GPU's memories, barriers and matrix units; slower
        still. That of jax 0.10 knows no transposed reference.

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
    axes = tuple(frozenset().union(*map(varying, operands)))
    first, *others = vary(tuple(operands), axes)
    target = Target() if simulated else Gpu()
    plgpu, several = mosaic_gpu(), {}
    if threads > 1:
        several = {"num_threads": threads, "thread_name": THREAD}
    kernel = plgpu.kernel(
        lambda *refs: body(target, lax.axis_index("program"), *refs),
        out_type=tuple(outputs),
        grid=(programs,),
        grid_names=("program",),
        **several,
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # What is set aside for a sum over warps: several warpgroups would share it.
            **({"reduction_scratch_bytes": 0} if several else {}),
        ),
        interpret=_simulator() if simulated else None,
    )
    first = first if simulated else needs_cuda(first, operation)
    return vary(tuple(kernel(first, *others)), axes)


def _simulator() -> Any:
    # Copies from past the end of an array are NaN here; a GPU's copy engine fills in zeros.
    beyond = {"out_of_bounds_reads": "uninitialized"}
    # It has a public name from jax 0.11 on.
    if hasattr(mosaic_gpu(), "InterpretGPUParams"):
        return mosaic_gpu().InterpretGPUParams(**beyond)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(**beyond)  # pyright: ignore


def needs_cuda(x: jax.Array, operation: str) -> jax.Array:
    """`x`, which raises where it is lowered for another platform."""
    return _needs_cuda.bind(x, operation=operation)


def _refuse(context, x, *, operation):
    platforms = ", ".join(context.module_context.platforms)
    raise ValueError(
        f'implementation="mosaic" of {operation} runs on NVIDIA GPUs from Hopper on, and this is '
        f'lowered for {platforms}: use "plain", or None for the best that applies.'
    )


_needs_cuda = Primitive("needs_cuda")
_needs_cuda.def_abstract_eval(lambda x, *, operation: x)
_needs_cuda.def_impl(lambda x, *, operation: jax.jit(needs_cuda, static_argnums=1)(x, operation))
mlir.register_lowering(_needs_cuda, _refuse)
mlir.register_lowering(_needs_cuda, lambda context, x, *, operation: [x], platform="cuda")


def flag(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A scalar condition for each element: a warpgroup selects by vectors alone."""
    return jnp.broadcast_to(value, shape)
