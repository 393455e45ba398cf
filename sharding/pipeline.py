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
      first: ``(ends, piece) -> x``, the input of the first chunk.
      chunk: ``(layers, x, piece, number) -> (x, loss, statistics)``, chunk `number` of them all;
        its own part of the loss, and sums over the piece.
      last: ``(ends, x, piece) -> (loss, metrics)``, from the output of the last chunk.
    """

    first: Callable[[Tree, Tree], Array]
    chunk: Callable[[Tree, Array, Tree, Array], tuple[Array, Array, Tree]]
    last: Callable[[Tree, Array, Tree], tuple[Array, Tree]]


class Pipeline(NamedTuple):
    """Where a pipeline runs.

    Attributes:
      stage: the mesh axis of the stages, as a tuple.
      everywhere: all mesh axes.
      rounds: chunks of each stage.
    """

    stage: tuple[str, ...]
    everywhere: tuple[str, ...]
    rounds: int = 1


def apply(
    stages: Stages, ends: Tree, layers: Tree, pieces: Tree, pipeline: Pipeline
) -> tuple[Tree, Tree]:
    """Every micro-batch forward.

    Communication per tick: one activation to the next stage.

    Args:
      stages: the network; the loss and metrics of `last` may be anything.
      ends: weights of `first` and `last`, on every stage.
      layers: weights of this stage's chunks, ``[round, ...]``.
      pieces: inputs ``[micro, ...]``, on every stage.

    Returns:
      What `stages.last` gives, ``[micro, ...]``, equal on all stages; and the statistics of this
      stage's chunks, ``[round, ...]``.
    """
    run = _Run.of(stages, ends, layers, pieces, pipeline)

    def tick(carry, now):
        arrived, outs, sums = carry
        work = run.schedule.forward(now, run.stage)
        x = run.entering(work, arrived)

        def leave(outs, x):
            return _put(outs, work.micro, stages.last(ends, x, run.piece(work)))

        def go(outs, sums):
            after, _, statistics = run.chunk(run.layers_of(work), x, work)
            outs = lax.cond(run.leaves(work), leave, lambda outs, _: outs, outs, after)
            return after, outs, _add(sums, work.round, statistics)

        after, outs, sums = lax.cond(work.active, go, lambda *rest: (run.no_x, *rest), outs, sums)
        return (run.send(after, 1), outs, sums), None

    begin = (run.no_x, _repeat(run.no_out, run.schedule.num_micro), run.no_statistics)
    (_, outs, sums), _ = lax.scan(tick, begin, jnp.arange(run.schedule.forward_ticks))
    return all_sum(outs, pipeline.stage), sums


class Sums(NamedTuple):
    """What `gradients` adds up.

    Attributes:
      loss: of this stage's chunks and, on the last stage, of `Stages.last`.
      ends: this stage's part of the gradient of `ends`.
      layers: the gradient of this stage's layers, ``[round, ...]``.
      metrics: of `Stages.last`, ``[micro, ...]``, equal on all stages.
      statistics: of this stage's chunks, ``[round, ...]``.
    """

    loss: Array
    ends: Tree
    layers: Tree
    metrics: Tree
    statistics: Tree


def gradients(stages: Stages, ends: Tree, layers: Tree, pieces: Tree, pipeline: Pipeline) -> Sums:
    """The loss of all micro-batches and its gradient.

    A stage keeps the inputs of its chunks, `Schedule.kept` of them, and runs each chunk again when
    it goes backward; the last chunk of all goes forward only then.

    Communication per tick: one activation to the next stage, one gradient to the one before.

    Args: as `apply`. Weights must vary over all mesh axes: a gradient is then this device's own.
    """
    run = _Run.of(stages, ends, layers, pieces, pipeline)
    schedule = run.schedule

    def tick(carry, now):
        arrived, arrived_grad, kept, sums = carry
        work = schedule.forward(now, run.stage)
        x = run.entering(work, arrived)
        slot = jnp.where(work.active, schedule.slot(work), schedule.kept)
        kept = kept.at[slot].set(x, mode="drop")
        after = lax.cond(
            work.active & ~run.leaves(work),
            lambda x: run.chunk(run.layers_of(work), x, work)[0],
            lambda x: run.no_x,
            x,
        )
        back = schedule.backward(now, run.stage)
        grad, sums = lax.cond(
            back.active,
            lambda sums, kept: run.backward(back, kept[schedule.slot(back)], arrived_grad, sums),
            lambda sums, kept: (run.no_x, sums),
            sums,
            kept,
        )
        return (run.send(after, 1), run.send(grad, -1), kept, sums), None

    nothing = Sums(
        loss=run.no_loss,
        ends=run.nothing_like(ends),
        layers=run.nothing_like(layers),
        metrics=_repeat(run.no_out[1], schedule.num_micro),
        statistics=run.no_statistics,
    )
    begin = (run.no_x, run.no_x, _repeat(run.no_x, schedule.kept), nothing)
    (*_, sums), _ = lax.scan(tick, begin, jnp.arange(schedule.ticks))
    return sums._replace(metrics=all_sum(sums.metrics, pipeline.stage))


@dataclass(frozen=True)
class _Run:
    """A pipeline on one stage. The fields `no_...` are zeros of the types that come up: the other
    branch of a condition."""

    stages: Stages
    ends: Tree
    layers: Tree
    pieces: Tree
    pipeline: Pipeline
    schedule: Schedule
    stage: Array
    no_x: Array
    no_loss: Array
    no_out: Tree
    no_statistics: Tree

    @classmethod
    def of(
        cls, stages: Stages, ends: Tree, layers: Tree, pieces: Tree, pipeline: Pipeline
    ) -> "_Run":
        num_micro = jax.tree.leaves(pieces)[0].shape[0]
        piece = _at(pieces, 0)
        no_x = _zeros(pipeline, lambda: vary(stages.first(ends, piece), pipeline.everywhere))
        stage = lax.axis_index(pipeline.stage)
        _, chunk_loss, statistics = _zeros(
            pipeline, lambda: stages.chunk(_at(layers, 0), no_x, piece, stage)
        )
        no_out = _zeros(pipeline, lambda: stages.last(ends, no_x, piece))
        return cls(
            stages=stages,
            ends=ends,
            layers=layers,
            pieces=pieces,
            pipeline=pipeline,
            schedule=Schedule(lax.axis_size(pipeline.stage), num_micro, pipeline.rounds),
            stage=stage,
            no_x=no_x,
            no_loss=_typed(chunk_loss, no_out[0]),
            no_out=no_out,
            no_statistics=_repeat(statistics, pipeline.rounds),
        )

    def nothing_like(self, weights: Tree) -> Tree:
        return vary(jax.tree.map(jnp.zeros_like, weights), self.pipeline.everywhere)

    def piece(self, work: Work) -> Tree:
        return _at(self.pieces, work.micro)

    def layers_of(self, work: Work) -> Tree:
        return _at(self.layers, work.round if self.pipeline.rounds > 1 else 0)

    def enters(self, work: Work) -> Array:
        return (self.stage == 0) & (work.round == 0)

    def leaves(self, work: Work) -> Array:
        return (self.stage == self.schedule.stages - 1) & (work.round == self.pipeline.rounds - 1)

    def first(self, ends: Tree, work: Work) -> Array:
        return vary(self.stages.first(ends, self.piece(work)), self.pipeline.everywhere)

    def chunk(self, layers: Tree, x: Array, work: Work) -> tuple[Array, Array, Tree]:
        number = work.round * self.schedule.stages + self.stage
        x, loss, statistics = self.stages.chunk(layers, x, self.piece(work), number)
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
        """`x` to the stage `step` further on; around the end only where there are more rounds."""
        n = self.schedule.stages
        pairs = [
            (i, (i + step) % n) for i in range(n) if self.pipeline.rounds > 1 or 0 <= i + step < n
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

        (after, loss), pull, statistics = jax.vjp(through, self.layers_of(work), x, has_aux=True)
        grad, sums = lax.cond(
            self.leaves(work),
            lambda sums, after: self._leave(work, after, sums),
            lambda sums, _: (arrived, sums),
            sums,
            after,
        )
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
            layers=_add(sums.layers, work.round, layers),
            statistics=_add(sums.statistics, work.round, statistics),
        )

    def _leave(self, work: Work, x: Array, sums: Sums) -> tuple[Array, Sums]:
        """`Stages.last`: the gradient of the last chunk's output `x`, and the sums."""
        loss, pull, metrics = jax.vjp(
            lambda ends, x: self.stages.last(ends, x, self.piece(work)), self.ends, x, has_aux=True
        )
        ends, grad = pull(_one(loss))
        return grad, sums._replace(
            loss=sums.loss + _typed(loss, sums.loss),
            ends=jax.tree.map(jnp.add, sums.ends, ends),
            metrics=_put(sums.metrics, work.micro, metrics),
        )

    def _enter(self, work: Work, grad: Array, ends: Tree) -> Tree:
        """The gradient of `ends` with that of `Stages.first` added."""
        _, pull = jax.vjp(lambda ends: self.first(ends, work), self.ends)
        return jax.tree.map(jnp.add, ends, pull(grad)[0])


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
    return jax.tree.map(lambda into, x: into.at[index].add(x), tree, _typed(values, tree))
