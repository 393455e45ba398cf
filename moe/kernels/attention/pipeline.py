"""Producer/consumer pipeline: one warpgroup of a program copies blocks to shared memory, the others
compute with them (warp specialisation, as in FlashAttention-3).

Shared memory has two slots for each kind of block: one is read while the other is being filled. The
producer needs few registers and releases the rest to the consumers, where the assembler lets it: in
code that nvJitLink links, as in JAX's pip packages, ``setmaxnreg`` is ignored, and each thread of
three warpgroups has 168 registers. Kernels that need more have no producer: the first of two
consumers fills the slots, and each thread has up to 255 registers.
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
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers of a thread of the producer, and of a thread of each of two consumers: in total no more
than a multiprocessor has."""

Refs = Sequence[Any]


class BlockLoop(NamedTuple):
    """Loop over the blocks of a pipeline, for consumers (`__call__`) and the producer
    (`load_blocks`).

    Attributes:
      count: number of blocks.
      slots: shared memory of each kind.
      arrived, free: barriers, one per slot: the block has been copied; all consumers have read it.
      blocks: from the number of a visit to the blocks of each kind, in device memory.
      refills: true for a consumer that fills the slots itself, in a kernel that has no producer.
    """

    count: Any
    slots: Refs
    arrived: Any
    free: Any
    blocks: Callable[[Any], Refs]
    refills: Any = False

    def __call__(self, step: Callable[[Any, Refs, Any], Any], carry: Any) -> Any:
        """Runs ``carry = step(index, block of each kind, carry)`` for each block, in order."""

        def visit_block(index, carry):
            slot = _slot(index)
            mosaic_gpu().barrier_wait(self.arrived.at[slot])
            carry = step(index, [x.at[slot] for x in self.slots], carry)

            # No warpgroup waits for the last blocks, so nothing arrives.
            @pl.when(index + SLOTS < self.count)
            def _():
                mosaic_gpu().barrier_arrive(self.free.at[slot])
                if self.refills is not False:
                    pl.when(self.refills)(partial(self._refill, index + SLOTS))

            return carry

        return lax.fori_loop(0, self.count, visit_block, carry)

    def fill(self) -> None:
        """Starts to copy the first blocks."""
        for index in range(SLOTS):
            pl.when(index < self.count)(partial(self._load, jnp.int32(index)))

    def _refill(self, index: Any) -> None:
        mosaic_gpu().barrier_wait(self.free.at[_slot(index)])
        self._load(index)

    def _load(self, index: Any) -> None:
        slot = _slot(index)
        _copy(self.blocks(index), [x.at[slot] for x in self.slots], self.arrived.at[slot])

    def load_blocks(self) -> None:
        """Starts to copy each block as soon as its slot is free."""

        def load_block(index, _):
            slot = _slot(index)

            # The first blocks find their slots empty.
            @pl.when(index >= SLOTS)
            def _():
                mosaic_gpu().barrier_wait(self.free.at[slot])

            self._load(index)

        lax.fori_loop(0, self.count, load_block, None)


def run_pipeline(
    target: Target,
    resident: Refs,
    blocks: Callable[[Any], Refs],
    count: Any,
    consumers: Sequence[Callable[[Any, Refs, BlockLoop], None]],
    *,
    producer: bool = True,
) -> None:
    """Runs ``consumer(warpgroup, resident, visit)`` in each of the first warpgroups of a program,
    and the producer, which copies their blocks, in the warpgroup after them.

    Args:
      resident: references to device memory whose contents are in shared memory all the time.
      blocks: from the number of a visit to the blocks of each kind, in device memory.
      count: number of visits.
      consumers: one for each warpgroup; if all are the same object, they share one compiled body.
      producer: false where the first of the consumers copies the blocks, and the program has no
        other warpgroups.
    """
    gpu, num_consumers = mosaic_gpu(), len(consumers)
    # The first blocks, for shapes and dtypes alone.
    kinds = blocks(jnp.int32(0))
    memory = [
        [gpu.SMEM(x.shape, x.dtype) for x in resident],
        [gpu.SMEM((SLOTS, *x.shape), x.dtype) for x in kinds],
        # Each copy arrives once at its barrier; each consumer arrives once when it has read a slot.
        gpu.Barrier(num_arrivals=len(resident)),
        gpu.Barrier(num_arrivals=len(kinds), num_barriers=SLOTS),
        gpu.Barrier(num_arrivals=num_consumers, num_barriers=SLOTS),
    ]

    def split(resident_memory, slots, resident_arrived, arrived, free):
        warpgroup = lax.axis_index(THREAD)
        visit = BlockLoop(count, slots, arrived, free, blocks)

        def consume(compute, refills):
            # With a single consumer, two warpgroups have 255 registers a thread anyway.
            if producer and num_consumers > 1:
                target.registers(CONSUMER_REGISTERS, "increase")
            gpu.barrier_wait(resident_arrived)
            compute(warpgroup, resident_memory, visit._replace(refills=refills))

        # Registers released here are what the consumers' increase waits for.
        def produce():
            if num_consumers > 1:
                target.registers(PRODUCER_REGISTERS, "decrease")
            _copy(resident, resident_memory, resident_arrived)
            visit.load_blocks()

        def start():
            _copy(resident, resident_memory, resident_arrived)
            visit.fill()

        if not producer:
            pl.when(warpgroup == 0)(start)
        # One branch for all: code that is there twice would be compiled twice.
        if len({*consumers}) == 1:
            refills = False if producer else warpgroup == 0
            pl.when(warpgroup < num_consumers)(partial(consume, consumers[0], refills))
        else:
            for index, compute in enumerate(consumers):
                refills = False if producer or index else warpgroup == 0
                pl.when(warpgroup == index)(partial(consume, compute, refills))
        if producer:
            pl.when(warpgroup == num_consumers)(produce)

    pl.run_scoped(split, *memory, collective_axes=THREAD)


def _copy(sources: Refs, buffers: Refs, barrier: Any) -> None:
    for source, buffer in zip(sources, buffers, strict=True):
        mosaic_gpu().copy_gmem_to_smem(source, buffer, barrier)


def _slot(index: Any) -> Any:
    return lax.rem(index, jnp.int32(SLOTS))
