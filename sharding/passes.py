"""Forward and backward pass of a micro-batch through a pipeline stage, and their residuals."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from sharding.collectives import vary
from sharding.residuals import Halves, halves
from sharding.schedule import Work
from sharding.stage import (
    Run,
    Tree,
    added,
    at,
    one_like,
    repeated,
    summed,
    typed_as,
    zeros_of,
)

Residuals = tuple[list[Array], list[Array]]
"""Residuals of `Stages.first` and of a chunk."""


class Sums(NamedTuple):
    """Accumulators of `sharding.pipeline.gradients`.

    Attributes:
      loss: of this stage's chunks and, on the last stage, of `Stages.last`.
      ends: this stage's part of the gradient of `ends` (embedding and head), float32.
      layers: the gradient of this stage's layers, ``[chunk, ...]``, float32.
      metrics: of `Stages.last`, ``[micro_batch, ...]``, equal on all stages.
      statistics: of this stage's chunks, ``[chunk, ...]``.
    """

    loss: Array
    ends: Tree
    layers: Tree
    metrics: Tree
    statistics: Tree


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of `Stages.first` and of a chunk, and their residual buffers.

    Attributes:
      first, chunk: `Stages.first` and `Stages.chunk`.
      slots: buffer slots of the residuals of each, ``[micro_batch, chunk]``.
      types: zeros of the types of one slot's residuals of each.
    """

    run: Run
    first: Halves
    chunk: Halves
    slots: tuple[list[list[int]], list[list[int]]]
    types: Residuals

    @classmethod
    def of(cls, run: Run) -> "Passes":
        micro_batch, everywhere = at(run.micro_batches, 0), run.pipeline.everywhere

        def through_first(given, _, micro_batch):
            (ends,) = given
            return vary(run.stages.first(ends, micro_batch), everywhere), None

        def through_chunk(given, x, micro_batch):
            layers, number = given
            x, loss, statistics = run.stages.chunk(layers, x, micro_batch, number)
            return (vary(x, everywhere), typed_as(loss, run.no_chunk_loss)), statistics

        first = halves(through_first, (run.ends,), (), micro_batch)
        layers = at(run.layers, 0)
        chunk = halves(through_chunk, (layers, run.stage), run.no_x, micro_batch)

        def residuals(passes: Halves, *given: Tree) -> list[Array]:
            return zeros_of(run.pipeline, lambda: passes.forward(*given)[1])

        slots = run.schedule.slots([0]), run.schedule.slots()
        return cls(
            run,
            first,
            chunk,
            slots=slots,
            types=(
                residuals(first, (run.ends,), (), micro_batch),
                residuals(chunk, (layers, run.stage), run.no_x, micro_batch),
            ),
        )

    def no_residuals(self) -> Residuals:
        """Initial residual buffers, zeros."""
        of_first, of_chunk = map(_number, self.slots)
        return repeated(self.types[0], of_first), repeated(self.types[1], of_chunk)

    def forward(
        self, work: Work, x: Array, grad: Array, before: Residuals, sums: Sums
    ) -> tuple[Array, Array, Residuals, Tree, Sums]:
        """Forward pass of one chunk, with `Stages.first` before the first, `last` after the last.

        Args:
          x: the received activations: the chunk's input, except for the first chunk.
          grad: the received gradient for the next backward pass.
          before: the residuals in the slots of this chunk.
          sums: without `layers` and `metrics`, which are None.

        Returns:
          The chunk's output; `grad`, after the last chunk that of its output; the residuals for
          these slots; the metrics of `Stages.last` or zeros; and the sums.
        """
        run, micro_batch = self.run, self.run.micro_batch(work)

        def enter(x, residuals):
            (x, _), residuals = self.first.forward((run.ends,), (), micro_batch)
            return x, typed_as(residuals, self.types[0])

        x, of_first = lax.cond(run.enters(work), enter, lambda *held: held, x, before[0])
        given = run.layers_of(work), run.number(work)
        ((after, loss), statistics), of_chunk = self.chunk.forward(given, x, micro_batch)
        sums = sums._replace(
            loss=sums.loss + typed_as(loss, sums.loss),
            statistics=added(sums.statistics, work.chunk, statistics),
        )
        grad, metrics, sums = lax.cond(
            run.leaves(work),
            lambda grad, sums, after: self._leave(work, after, sums),
            lambda grad, sums, after: (grad, run.no_out[1], sums),
            *(grad, sums, after),
        )
        return after, grad, (of_first, typed_as(of_chunk, self.types[1])), metrics, sums

    def backward(
        self, work: Work, grad: Array, residuals: Residuals, ends: Tree, layers: Tree
    ) -> tuple[Array, Tree, Tree]:
        """Backward pass of one chunk, with that of `Stages.first` before the first.

        Args:
          grad: the gradient of the chunk's output.
          residuals: the buffers.
          ends: the sum of gradients of `Stages.first` and `Stages.last`.
          layers: the sum of gradients of this stage's layers, ``[chunk, ...]``.

        Returns:
          The gradient of the chunk's input, and the two sums.
        """
        run, slots = self.run, self.slots_of(work)
        given = run.layers_of(work), run.number(work)
        # Each chunk has its own part of the loss (the router's), hence a cotangent of one besides
        # the received gradient.
        one = one_like(run.no_chunk_loss)
        part, grad = self.chunk.backward(given, at(residuals[1], slots[1]), (grad, one))

        def enter(ends: Tree, of_first: list[Array], grad: Array) -> Tree:
            part, _ = self.first.backward((run.ends,), at(of_first, slots[0]), grad)
            return summed(ends, part)

        ends = lax.cond(run.enters(work), enter, lambda ends, *_: ends, ends, residuals[0], grad)
        return grad, ends, added(layers, work.chunk, part)

    def slots_of(self, work: Work) -> tuple[Array, Array]:
        """Buffer slots of a chunk; slot 0 without work."""
        places = (jnp.asarray(slots, jnp.int32) for slots in self.slots)
        of_first, of_chunk = (
            jnp.where(work.active, places[work.micro_batch, work.chunk], 0) for places in places
        )
        return of_first, of_chunk

    def _leave(self, work: Work, x: Array, sums: Sums) -> tuple[Array, Tree, Sums]:
        """`Stages.last`: the gradient of the last chunk's output `x`, the metrics and the sums."""
        run = self.run
        loss, pull, metrics = jax.vjp(
            lambda ends, x: run.stages.last(ends, x, run.micro_batch(work)),
            run.ends,
            x,
            has_aux=True,
        )
        ends, grad = pull(one_like(loss))
        return (
            grad,
            typed_as(metrics, run.no_out[1]),
            sums._replace(
                loss=sums.loss + typed_as(loss, sums.loss),
                ends=summed(sums.ends, ends),
            ),
        )


def _number(slots: list[list[int]]) -> int:
    """Number of slots."""
    return max(map(max, slots)) + 1
