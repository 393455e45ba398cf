"""Forward and backward pass of a micro-batch through a pipeline stage, and their residuals."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from sharding.collectives import vary
from sharding.residuals import ForwardBackward, split_passes
from sharding.schedule import Work
from sharding.stage import (
    Run,
    Tree,
    add_at,
    add_trees,
    index_tree,
    ones_like_varying,
    repeat_tree,
    vary_like,
    zeros_of,
)

Residuals = tuple[list[Array], list[Array]]
"""Residuals of `Stages.first` and of a chunk."""


class Sums(NamedTuple):
    """Accumulators of `sharding.pipeline.gradients`.

    Attributes:
      loss: of this stage's chunks and, on the last stage, of `Stages.last`.
      embed_and_head: this stage's part of the gradient of embedding and head, float32.
      layers: the gradient of this stage's layers, ``[chunk, ...]``, float32.
      metrics: of `Stages.last`, ``[micro_batch, ...]``, equal on all stages.
      statistics: of this stage's chunks, ``[chunk, ...]``.
    """

    loss: Array
    embed_and_head: Tree
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
    first: ForwardBackward
    chunk: ForwardBackward
    slots: tuple[list[list[int]], list[list[int]]]
    types: Residuals

    @classmethod
    def build(cls, run: Run) -> "Passes":
        micro_batch, everywhere = index_tree(run.micro_batches, 0), run.pipeline.everywhere

        def through_first(shared, _, micro_batch):
            (embed_and_head,) = shared
            return vary(run.stages.first(embed_and_head, micro_batch), everywhere), None

        def through_chunk(shared, x, micro_batch):
            layers, chunk_index = shared
            x, loss, statistics = run.stages.chunk(layers, x, micro_batch, chunk_index)
            return (vary(x, everywhere), vary_like(loss, run.no_chunk_loss)), statistics

        first = split_passes(through_first, (run.embed_and_head,), (), micro_batch)
        layers = index_tree(run.layers, 0)
        chunk = split_passes(through_chunk, (layers, run.stage), run.no_x, micro_batch)

        def residuals(passes: ForwardBackward, *args: Tree) -> list[Array]:
            return zeros_of(run.pipeline, lambda: passes.forward(*args)[1])

        slots = run.schedule.slots([0]), run.schedule.slots()
        return cls(
            run,
            first,
            chunk,
            slots=slots,
            types=(
                residuals(first, (run.embed_and_head,), (), micro_batch),
                residuals(chunk, (layers, run.stage), run.no_x, micro_batch),
            ),
        )

    def no_residuals(self) -> Residuals:
        """Initial residual buffers, zeros."""
        num_first, num_chunk = map(_num_slots, self.slots)
        return repeat_tree(self.types[0], num_first), repeat_tree(self.types[1], num_chunk)

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
            (x, _), residuals = self.first.forward((run.embed_and_head,), (), micro_batch)
            return x, vary_like(residuals, self.types[0])

        x, first_residuals = lax.cond(
            run.is_first_chunk(work), enter, lambda *operands: operands, x, before[0]
        )
        shared = run.layers_of(work), run.chunk_index(work)
        ((after, loss), statistics), chunk_residuals = self.chunk.forward(shared, x, micro_batch)
        sums = sums._replace(
            loss=sums.loss + vary_like(loss, sums.loss),
            statistics=add_at(sums.statistics, work.chunk, statistics),
        )
        grad, metrics, sums = lax.cond(
            run.is_last_chunk(work),
            lambda grad, sums, after: self._leave(work, after, sums),
            lambda grad, sums, after: (grad, run.no_out[1], sums),
            *(grad, sums, after),
        )
        return (
            after,
            grad,
            (first_residuals, vary_like(chunk_residuals, self.types[1])),
            metrics,
            sums,
        )

    def backward(
        self, work: Work, grad: Array, residuals: Residuals, embed_and_head: Tree, layers: Tree
    ) -> tuple[Array, Tree, Tree]:
        """Backward pass of one chunk, with that of `Stages.first` before the first.

        Args:
          grad: the gradient of the chunk's output.
          residuals: the buffers.
          embed_and_head: the sum of gradients of `Stages.first` and `Stages.last`.
          layers: the sum of gradients of this stage's layers, ``[chunk, ...]``.

        Returns:
          The gradient of the chunk's input, and the two sums.
        """
        run, slots = self.run, self.slots_of(work)
        shared = run.layers_of(work), run.chunk_index(work)
        # Each chunk has its own part of the loss (the router's), hence a cotangent of one besides
        # the received gradient.
        unit_cotangent = ones_like_varying(run.no_chunk_loss)
        layer_gradient, grad = self.chunk.backward(
            shared, index_tree(residuals[1], slots[1]), (grad, unit_cotangent)
        )

        def enter(embed_and_head: Tree, first_residuals: list[Array], grad: Array) -> Tree:
            embed_and_head_gradient, _ = self.first.backward(
                (run.embed_and_head,), index_tree(first_residuals, slots[0]), grad
            )
            return add_trees(embed_and_head, embed_and_head_gradient)

        embed_and_head = lax.cond(
            run.is_first_chunk(work),
            enter,
            lambda embed_and_head, *_: embed_and_head,
            embed_and_head,
            residuals[0],
            grad,
        )
        return grad, embed_and_head, add_at(layers, work.chunk, layer_gradient)

    def slots_of(self, work: Work) -> tuple[Array, Array]:
        """Buffer slots of a chunk; slot 0 without work."""
        tables = (jnp.asarray(slots, jnp.int32) for slots in self.slots)
        first_slot, chunk_slot = (
            jnp.where(work.active, table[work.micro_batch, work.chunk], 0) for table in tables
        )
        return first_slot, chunk_slot

    def _leave(self, work: Work, x: Array, sums: Sums) -> tuple[Array, Tree, Sums]:
        """`Stages.last`: the gradient of the last chunk's output `x`, the metrics and the sums."""
        run = self.run
        loss, vjp_fn, metrics = jax.vjp(
            lambda embed_and_head, x: run.stages.last(embed_and_head, x, run.micro_batch(work)),
            run.embed_and_head,
            x,
            has_aux=True,
        )
        embed_and_head, grad = vjp_fn(ones_like_varying(loss))
        return (
            grad,
            vary_like(metrics, run.no_out[1]),
            sums._replace(
                loss=sums.loss + vary_like(loss, sums.loss),
                embed_and_head=add_trees(sums.embed_and_head, embed_and_head),
            ),
        )


def _num_slots(slots: list[list[int]]) -> int:
    """Number of slots."""
    return max(map(max, slots)) + 1
