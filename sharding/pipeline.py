"""Micro-batches through the stages of a pipeline, inside the one `jax.shard_map`.

`apply` goes forward, `gradients` forward and backward, both by `sharding.schedule.Schedule`. What a
chunk of layers is, and what comes before the first and after the last, they are told: `Stages`.
Work that a stage does not have in a tick is left out by `lax.cond`, not computed and masked. That
is legal with collectives inside because the condition is the same for all devices of a stage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from sharding.collectives import all_sum, vary, varying
from sharding.schedule import Schedule, Work

Tree = Any
"""A pytree of arrays."""


class Stages(NamedTuple):
    """What a pipeline runs.

    Attributes:
      first: ``(ends, micro_batch) -> x``, the input of the first chunk.
      chunk: ``(layers, x, micro_batch, number) -> (x, loss, statistics)``, model chunk `number` of
        them all; its own part of the loss, and sums over the micro-batch.
      last: ``(ends, x, micro_batch) -> (loss, metrics)``, from the output of the last chunk.
    """

    first: Callable[[Tree, Tree], Array]
    chunk: Callable[[Tree, Array, Tree, Array], tuple[Array, Array, Tree]]
    last: Callable[[Tree, Array, Tree], tuple[Array, Tree]]


class Pipeline(NamedTuple):
    """Where a pipeline runs.

    Attributes:
      stage: the mesh axis of the stages, as a tuple.
      everywhere: all mesh axes.
      num_chunks: model chunks of each stage (virtual pipeline stages).
    """

    stage: tuple[str, ...]
    everywhere: tuple[str, ...]
    num_chunks: int = 1


def apply(
    stages: Stages, ends: Tree, layers: Tree, micro_batches: Tree, pipeline: Pipeline
) -> tuple[Tree, Tree]:
    """Every micro-batch forward.

    Communication per tick: one activation to the next stage.

    Args:
      stages: the network; the loss and metrics of `last` may be anything.
      ends: weights of `first` and `last`, on every stage.
      layers: weights of this stage's chunks, ``[chunk, ...]``.
      micro_batches: inputs ``[micro_batch, ...]``, on every stage.

    Returns:
      What `stages.last` gives, ``[micro_batch, ...]``, equal on all stages; and the statistics of
      this stage's chunks, ``[chunk, ...]``.
    """
    run = _Run.of(stages, ends, layers, micro_batches, pipeline)

    def tick(carry, now):
        arrived, outs, sums = carry
        work = run.schedule.forward(now, run.stage)
        x = run.entering(work, arrived)

        def leave(outs, x):
            return _put(outs, work.micro_batch, stages.last(ends, x, run.micro_batch(work)))

        def go(outs, sums):
            after, _, statistics = run.chunk(run.layers_of(work), x, work)
            outs = lax.cond(run.leaves(work), leave, lambda outs, _: outs, outs, after)
            return after, outs, _add(sums, work.chunk, statistics)

        after, outs, sums = lax.cond(work.active, go, lambda *rest: (run.no_x, *rest), outs, sums)
        return (run.send(after, 1), outs, sums), None

    begin = (run.no_x, _repeat(run.no_out, run.schedule.num_micro_batches), run.no_statistics)
    (_, outs, sums), _ = lax.scan(tick, begin, jnp.arange(run.schedule.forward_ticks))
    # All stages but the last hold zeros: the sum hands its results to everybody.
    return all_sum(outs, pipeline.stage), sums


class Sums(NamedTuple):
    """What `gradients` adds up.

    Attributes:
      loss: of this stage's chunks and, on the last stage, of `Stages.last`.
      ends: this stage's part of the gradient of `ends`, float32.
      layers: the gradient of this stage's layers, ``[chunk, ...]``, float32.
      metrics: of `Stages.last`, ``[micro_batch, ...]``, equal on all stages.
      statistics: of this stage's chunks, ``[chunk, ...]``.
    """

    loss: Array
    ends: Tree
    layers: Tree
    metrics: Tree
    statistics: Tree


def gradients(
    stages: Stages, ends: Tree, layers: Tree, micro_batches: Tree, pipeline: Pipeline
) -> Sums:
    """The loss of all micro-batches and its gradient.

    A stage saves the inputs of its chunks, `Schedule.num_saved` of them, and runs each chunk again
    when it goes backward (full recomputation, in Megatron's words); the last chunk of all goes
    forward only then.

    Communication per tick: one activation to the next stage, one gradient to the one before.

    Args: as `apply`. Weights must vary over all mesh axes: a gradient is then this device's own.
    """
    run = _Run.of(stages, ends, layers, micro_batches, pipeline)
    schedule = run.schedule

    def tick(carry, now):
        arrived, arrived_grad, saved, sums = carry
        work = schedule.forward(now, run.stage)
        x = run.entering(work, arrived)
        # Past the end is nowhere: without work nothing is saved over what is still needed.
        slot = jnp.where(work.active, schedule.slot(work), schedule.num_saved)
        saved = saved.at[slot].set(x, mode="drop")
        # The last chunk's output is wanted by its own backward pass alone, which makes it again.
        after = lax.cond(
            work.active & ~run.leaves(work),
            lambda x: run.chunk(run.layers_of(work), x, work)[0],
            lambda x: run.no_x,
            x,
        )
        # Forward before backward: the last stage goes backward in the tick in which its input came.
        back = schedule.backward(now, run.stage)
        grad, sums = lax.cond(
            back.active,
            lambda sums, saved: run.backward(back, saved[schedule.slot(back)], arrived_grad, sums),
            lambda sums, saved: (run.no_x, sums),
            sums,
            saved,
        )
        # Outside of all conditions: a permute is a collective of all stages, whoever has work.
        return (run.send(after, 1), run.send(grad, -1), saved, sums), None

    nothing = Sums(
        loss=run.no_loss,
        ends=run.nothing_like(ends),
        layers=run.nothing_like(layers),
        metrics=_repeat(run.no_out[1], schedule.num_micro_batches),
        statistics=run.no_statistics,
    )
    begin = (run.no_x, run.no_x, _repeat(run.no_x, schedule.num_saved), nothing)
    (*_, sums), _ = lax.scan(tick, begin, jnp.arange(schedule.ticks))
    return sums._replace(metrics=all_sum(sums.metrics, pipeline.stage))


@dataclass(frozen=True)
class _Run:
    """A pipeline on one stage. The fields `no_...` are zeros of the types that come up: the other
    branch of a condition, which must have the same type, `vma` included."""

    stages: Stages
    ends: Tree
    layers: Tree
    micro_batches: Tree
    pipeline: Pipeline
    schedule: Schedule
    stage: Array
    no_x: Array
    no_loss: Array
    no_out: Tree
    no_statistics: Tree

    @classmethod
    def of(
        cls, stages: Stages, ends: Tree, layers: Tree, micro_batches: Tree, pipeline: Pipeline
    ) -> "_Run":
        num_micro_batches = jax.tree.leaves(micro_batches)[0].shape[0]
        micro_batch = _at(micro_batches, 0)
        no_x = _zeros(pipeline, lambda: vary(stages.first(ends, micro_batch), pipeline.everywhere))
        stage = lax.axis_index(pipeline.stage)
        _, chunk_loss, statistics = _zeros(
            pipeline, lambda: stages.chunk(_at(layers, 0), no_x, micro_batch, stage)
        )
        no_out = _zeros(pipeline, lambda: stages.last(ends, no_x, micro_batch))
        return cls(
            stages=stages,
            ends=ends,
            layers=layers,
            micro_batches=micro_batches,
            pipeline=pipeline,
            schedule=Schedule(
                lax.axis_size(pipeline.stage), num_micro_batches, pipeline.num_chunks
            ),
            stage=stage,
            no_x=no_x,
            no_loss=_typed(chunk_loss, no_out[0]),
            no_out=no_out,
            no_statistics=_repeat(statistics, pipeline.num_chunks),
        )

    def nothing_like(self, weights: Tree) -> Tree:
        """Sums of gradients before the first, in float32 whatever the weights are."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), weights)
        return vary(zeros, self.pipeline.everywhere)

    def micro_batch(self, work: Work) -> Tree:
        return _at(self.micro_batches, work.micro_batch)

    def layers_of(self, work: Work) -> Tree:
        # A constant index where there is one chunk: its layers are then a view and not a gather.
        return _at(self.layers, work.chunk if self.pipeline.num_chunks > 1 else 0)

    def enters(self, work: Work) -> Array:
        return (self.stage == 0) & (work.chunk == 0)

    def leaves(self, work: Work) -> Array:
        return (self.stage == self.schedule.stages - 1) & (
            work.chunk == self.pipeline.num_chunks - 1
        )

    def first(self, ends: Tree, work: Work) -> Array:
        return vary(self.stages.first(ends, self.micro_batch(work)), self.pipeline.everywhere)

    def chunk(self, layers: Tree, x: Array, work: Work) -> tuple[Array, Array, Tree]:
        number = work.chunk * self.schedule.stages + self.stage
        x, loss, statistics = self.stages.chunk(layers, x, self.micro_batch(work), number)
        return vary(x, self.pipeline.everywhere), loss, statistics

    def entering(self, work: Work, arrived: Array) -> Array:
        """The input of a chunk: what arrived or, for the first, what `Stages.first` makes."""
        return lax.cond(
            work.active & self.enters(work),
            lambda arrived: self.first(self.ends, work),
            lambda arrived: arrived,
            arrived,
        )

    def send(self, x: Array, step: int) -> Array:
        """`x` to the stage `step` further on; around the end only where there are more chunks."""
        n = self.schedule.stages
        # Without more chunks the last stage has nothing for the first, and nothing is sent.
        pairs = [
            (i, (i + step) % n)
            for i in range(n)
            if self.pipeline.num_chunks > 1 or 0 <= i + step < n
        ]
        return lax.ppermute(x, self.pipeline.stage, pairs)

    def backward(self, work: Work, x: Array, arrived: Array, sums: Sums) -> tuple[Array, Sums]:
        """One chunk forward again and backward, with what lies before the first or after the last.

        Args:
          x: the chunk's input.
          arrived: the gradient of its output, from the next stage.

        Returns:
          The gradient of `x`, and the sums.
        """

        def through(layers, x):
            x, loss, statistics = self.chunk(layers, x, work)
            return (x, loss), statistics

        # `jax.vjp` runs the chunk forward here: nothing of it was kept but its input.
        (after, loss), pull, statistics = jax.vjp(through, self.layers_of(work), x, has_aux=True)
        # The gradient of a chunk's output: made here after the last chunk, else sent by the next.
        grad, sums = lax.cond(
            self.leaves(work),
            lambda sums, after: self._leave(work, after, sums),
            lambda sums, _: (arrived, sums),
            sums,
            after,
        )
        # Each chunk has its own part of the loss (the router's), hence a cotangent of one beside
        # the gradient that arrived.
        layers, grad = pull((grad, _one(loss)))
        ends = lax.cond(
            self.enters(work),
            lambda ends, grad: self._enter(work, grad, ends),
            lambda ends, _: ends,
            sums.ends,
            grad,
        )
        return grad, sums._replace(
            loss=sums.loss + _typed(loss, sums.loss),
            ends=ends,
            layers=_add(sums.layers, work.chunk, layers),
            statistics=_add(sums.statistics, work.chunk, statistics),
        )

    def _leave(self, work: Work, x: Array, sums: Sums) -> tuple[Array, Sums]:
        """`Stages.last`: the gradient of the last chunk's output `x`, and the sums."""
        loss, pull, metrics = jax.vjp(
            lambda ends, x: self.stages.last(ends, x, self.micro_batch(work)),
            self.ends,
            x,
            has_aux=True,
        )
        ends, grad = pull(_one(loss))
        return grad, sums._replace(
            loss=sums.loss + _typed(loss, sums.loss),
            ends=_sum(sums.ends, ends),
            metrics=_put(sums.metrics, work.micro_batch, metrics),
        )

    def _enter(self, work: Work, grad: Array, ends: Tree) -> Tree:
        """The gradient of `ends` with that of `Stages.first` added."""
        # `Stages.first` runs again, as chunks do: nothing of it was saved but what it gave.
        _, pull = jax.vjp(lambda ends: self.first(ends, work), self.ends)
        return _sum(ends, pull(grad)[0])


def _zeros(pipeline: Pipeline, function: Callable[[], Tree]) -> Tree:
    """Zeros of the types of what `function` returns, which may differ between stages."""

    def zeros(shape):
        also = sorted(shape.manual_axis_type.varying | set(pipeline.stage))
        return vary(jnp.zeros(shape.shape, shape.dtype), tuple(also))

    return jax.tree.map(zeros, jax.eval_shape(function))


def _typed(tree: Tree, like: Tree) -> Tree:
    """`tree` typed as varying wherever `like` does."""
    return jax.tree.map(lambda x, other: vary(x, tuple(sorted(varying(other)))), tree, like)


def _one(loss: Array) -> Array:
    return vary(jnp.ones_like(loss), tuple(sorted(varying(loss))))


def _repeat(tree: Tree, number: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)


def _at(tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda x: x[index], tree)


def _put(tree: Tree, index: Array, values: Tree) -> Tree:
    return jax.tree.map(lambda into, x: into.at[index].set(x), tree, _typed(values, tree))


def _add(tree: Tree, index: Array, values: Tree) -> Tree:
    values = jax.tree.map(lambda into, x: x.astype(into.dtype), tree, values)
    return jax.tree.map(lambda into, x: into.at[index].add(x), tree, _typed(values, tree))


def _sum(tree: Tree, values: Tree) -> Tree:
    """`tree` with the values added, in its dtypes."""
    return jax.tree.map(lambda into, x: into + x.astype(into.dtype), tree, values)
