"""One pipeline stage: chunks of layers, embedding and head, messages to its neighbours."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from sharding.collectives import typed_zeros, vary, varying
from sharding.schedule import Schedule, StagePair, Work

Tree = Any
"""A pytree of arrays."""


class Stages(NamedTuple):
    """Network functions of a pipeline.

    Attributes:
      first: ``(embed_and_head, micro_batch) -> x``, the input of the first chunk (embedding).
      chunk: ``(layers, x, micro_batch, number) -> (x, loss, statistics)``, the model chunk of that
        global index; its own part of the loss, and sums over the micro-batch.
      last: ``(embed_and_head, x, micro_batch) -> (loss, metrics)``, from the output of the last
        chunk (head).
    """

    first: Callable[[Tree, Tree], Array]
    chunk: Callable[[Tree, Array, Tree, Array], tuple[Array, Array, Tree]]
    last: Callable[[Tree, Array, Tree], tuple[Array, Tree]]


class Pipeline(NamedTuple):
    """Mesh axes of a pipeline.

    Attributes:
      stage: the mesh axis of the stages, as a tuple.
      everywhere: all mesh axes.
      num_chunks: model chunks of each stage (virtual pipeline stages).
    """

    stage: tuple[str, ...]
    everywhere: tuple[str, ...]
    num_chunks: int = 1


class Run:
    """A pipeline on one stage.

    The attributes `no_...` are zeros of the types of activations, losses and results, for the other
    branch of a condition, which must have the same type, `vma` included.
    """

    def __init__(
        self,
        stages: Stages,
        embed_and_head: Tree,
        layers: Tree,
        micro_batches: Tree,
        pipeline: Pipeline,
    ):
        self.stages, self.pipeline = stages, pipeline
        self.embed_and_head, self.layers = embed_and_head, layers
        # Residuals of a micro-batch differ between stages, as the buffers hold different ones.
        self.micro_batches = vary(micro_batches, pipeline.stage)
        micro_batch = index_tree(self.micro_batches, 0)
        self.no_x = zeros_of(
            pipeline, lambda: vary(stages.first(embed_and_head, micro_batch), pipeline.everywhere)
        )
        self.stage = lax.axis_index(pipeline.stage)
        _, self.no_chunk_loss, statistics = zeros_of(
            pipeline,
            lambda: stages.chunk(index_tree(layers, 0), self.no_x, micro_batch, self.stage),
        )
        self.no_out = zeros_of(
            pipeline, lambda: stages.last(embed_and_head, self.no_x, micro_batch)
        )
        self.no_loss = vary_like(self.no_chunk_loss, self.no_out[0])
        self.no_statistics = repeat_tree(statistics, pipeline.num_chunks)
        num_stages, num_chunks = lax.axis_size(pipeline.stage), pipeline.num_chunks
        num_micro_batches = jax.tree.leaves(micro_batches)[0].shape[0]
        self.schedule = Schedule(num_stages, num_micro_batches, num_chunks)

    def zero_gradients(self, weights: Tree) -> Tree:
        """Zero accumulators of gradients, in float32 whatever the dtype of the weights."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), weights)
        return vary(zeros, self.pipeline.everywhere)

    def micro_batch(self, work: Work) -> Tree:
        return index_tree(self.micro_batches, work.micro_batch)

    def layers_of(self, work: Work) -> Tree:
        # A constant index if there is one chunk: its layers are then a view and not a gather.
        return index_tree(self.layers, work.chunk if self.pipeline.num_chunks > 1 else 0)

    def is_first_chunk(self, work: Work) -> Array:
        return (self.stage == 0) & (work.chunk == 0)

    def is_last_chunk(self, work: Work) -> Array:
        return (self.stage == self.schedule.stages - 1) & (
            work.chunk == self.pipeline.num_chunks - 1
        )

    def chunk_index(self, work: Work) -> Array:
        """Global index of the model chunk."""
        return work.chunk * self.schedule.stages + self.stage

    def chunk_input(self, work: Work, received: Array) -> Array:
        """Input of a chunk: the received activations or, for the first, the output of
        `Stages.first`."""
        return lax.cond(
            work.active & self.is_first_chunk(work),
            lambda received: vary(
                self.stages.first(self.embed_and_head, self.micro_batch(work)),
                self.pipeline.everywhere,
            ),
            lambda received: received,
            received,
        )

    def send(self, x: Array) -> Array:
        """Sends `x` to the next stage; from the last to the first only with multiple chunks."""
        # With one chunk per stage the last stage sends nothing to the first.
        pairs = [pair for parity in (0, 1) for pair in self.schedule.messages(parity)[0]]
        return lax.ppermute(x, self.pipeline.stage, sorted(pairs))

    def exchange(
        self, now: Array, after: Array, before: Array, x: Array, grad: Array
    ) -> tuple[Array, Array]:
        """Exchanges messages at the end of a tick: input of the next forward chunk, and gradient.

        `after` is the output of a chunk, `before` the gradient of a chunk's input. `x` and `grad`,
        the last that were received, are returned if nothing is sent.
        """

        def permute(values: Array, pairs: list[StagePair], unchanged: Array) -> Array:
            return lax.ppermute(values, self.pipeline.stage, pairs) if pairs else unchanged

        def exchange_at(parity: int) -> Callable[..., tuple[Array, Array]]:
            forward, backward = self.schedule.messages(parity)
            return lambda after, before, x, grad: (
                permute(after, forward, x),
                permute(before, backward, grad),
            )

        # Equal on all devices, and so a condition that may contain collectives.
        return lax.cond(now % 2 == 0, exchange_at(0), exchange_at(1), after, before, x, grad)


def zeros_of(pipeline: Pipeline, function: Callable[[], Tree]) -> Tree:
    """Zeros of the types that `function` returns, typed as varying over the stages too."""
    return vary(typed_zeros(jax.eval_shape(function)), pipeline.stage)


def vary_like(tree: Tree, like: Tree) -> Tree:
    """`tree` typed as varying wherever `like` does."""
    return jax.tree.map(lambda x, other: vary(x, tuple(sorted(varying(other)))), tree, like)


def repeat_tree(tree: Tree, count: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def index_tree(tree: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda x: x[index], tree)


def store_at(tree: Tree, index: Array, values: Tree) -> Tree:
    def update(buffer: Array, x: Array) -> Array:
        return lax.dynamic_update_index_in_dim(buffer, x, index, 0)

    return jax.tree.map(update, tree, values)


def set_at(tree: Tree, index: Array, values: Tree) -> Tree:
    return jax.tree.map(lambda buffer, x: buffer.at[index].set(x), tree, vary_like(values, tree))


def add_at(tree: Tree, index: Array, values: Tree) -> Tree:
    values = jax.tree.map(lambda buffer, x: x.astype(buffer.dtype), tree, values)
    return jax.tree.map(lambda buffer, x: buffer.at[index].add(x), tree, vary_like(values, tree))


def add_trees(tree: Tree, values: Tree) -> Tree:
    """`tree` with the values added, in its dtypes."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), tree, values)
