"""Blocks that one warpgroup of a program brings to shared memory, and others compute with.

There is room for two of a kind: one is read, the next is on its way. The warpgroup that brings them
needs few registers and leaves its own to the others (FlashAttention-3's producer and consumers).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moe.kernels.mosaic import THREAD, Target, mosaic_gpu

SLOTS = 2
"""Blocks of a kind in shared memory."""
FEW, MANY = 40, 232
"""Registers of a thread that brings blocks, and of one of two warpgroups that compute: together as
many as a multiprocessor has."""

Refs = Sequence[Any]


class Visit(NamedTuple):
    """The blocks as they arrive.

    Attributes:
      count: how many.
      slots: memory of each kind.
      arrived, free: barriers, one a slot: the block is there; all have computed with it.
    """

    count: Any
    slots: Refs
    arrived: Any
    free: Any

    def __call__(self, step: Callable[[Any, Refs, Any], Any], carry: Any) -> Any:
        """``carry = step(number, block of each kind, carry)``, one number after the other."""

        def one(number, carry):
            slot = _slot(number)
            mosaic_gpu().barrier_wait(self.arrived.at[slot])
            carry = step(number, [x.at[slot] for x in self.slots], carry)

            # Nobody waits for the last ones.
            @pl.when(number + SLOTS < self.count)
            def _():
                mosaic_gpu().barrier_arrive(self.free.at[slot])

            return carry

        return lax.fori_loop(0, self.count, one, carry)

    def bring(self, blocks: Callable[[Any], Refs]) -> None:
        """Begins to copy each as soon as there is room."""

        def one(number, _):
            slot = _slot(number)

            @pl.when(number >= SLOTS)
            def _():
                mosaic_gpu().barrier_wait(self.free.at[slot])

            _copy(blocks(number), [x.at[slot] for x in self.slots], self.arrived.at[slot])

        lax.fori_loop(0, self.count, one, None)


def pipelined(
    target: Target,
    held: Refs,
    blocks: Callable[[Any], Refs],
    count: Any,
    consumers: Sequence[Callable[[Any, Refs, Visit], None]],
) -> None:
    """Runs ``consumer(warpgroup, held, visit)`` in each of the first warpgroups of a program, and
    brings what they need in the one after them.

    Args:
      held: in device memory, what is in shared memory all the time.
      blocks: by its number, those of each kind that are visited.
      count: how many.
      consumers: one for each warpgroup; where it is the same, one body serves them.
    """
    gpu, number = mosaic_gpu(), len(consumers)
    kinds = blocks(jnp.int32(0))
    memory = [
        [gpu.SMEM(x.shape, x.dtype) for x in held],
        [gpu.SMEM((SLOTS, *x.shape), x.dtype) for x in kinds],
        gpu.Barrier(num_arrivals=len(held)),
        gpu.Barrier(num_arrivals=len(kinds), num_barriers=SLOTS),
        gpu.Barrier(num_arrivals=number, num_barriers=SLOTS),
    ]

    def split(own, slots, asked, arrived, free):
        warpgroup, visit = lax.axis_index(THREAD), Visit(count, slots, arrived, free)

        def consume(compute):
            if number > 1:
                target.registers(MANY, "increase")
            gpu.barrier_wait(asked)
            compute(warpgroup, own, visit)

        def bring():
            if number > 1:
                target.registers(FEW, "decrease")
            _copy(held, own, asked)
            visit.bring(blocks)

        if len({*consumers}) == 1:
            pl.when(warpgroup < number)(partial(consume, consumers[0]))
        else:
            for at, compute in enumerate(consumers):
                pl.when(warpgroup == at)(partial(consume, compute))
        pl.when(warpgroup == number)(bring)

    pl.run_scoped(split, *memory, collective_axes=THREAD)


def _copy(sources: Refs, places: Refs, barrier: Any) -> None:
    for source, place in zip(sources, places, strict=True):
        mosaic_gpu().copy_gmem_to_smem(source, place, barrier)


def _slot(number: Any) -> Any:
    return lax.rem(number, jnp.int32(SLOTS))
