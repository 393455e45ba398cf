"""Pipeline parallelism: micro-batches through the stages, inside the one `jax.shard_map`.

`apply` runs the forward pass, `gradients` forward and backward, both by
`sharding.schedule.Schedule`. The caller defines a chunk of layers, embedding and head as `Stages`.
A tick in which a stage has no work is skipped by `lax.cond`, not computed and masked. The condition
is equal on all devices of a stage, so collectives over groups inside a stage are legal in it. A
collective-permute is not: it is one operation of all devices of the program. Ring attention
therefore uses exchanges in groups here (`moe.attention.ring_schedule`), and activations and
gradients are sent from stage to stage outside of these conditions.

`jax.vjp` returns a function that holds the residuals of the backward pass. A pipeline runs other
micro-batches forward before it runs one backward, so it keeps the residuals of multiple
micro-batches: as arrays, in a buffer (`split_passes`). Residuals that depend on the weights only,
such as their copies in another dtype, are not kept but recomputed, as the weights are available in
the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

from sharding.collectives import all_sum, typed_zeros, vary, varying
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


Residuals = tuple[list[Array], list[Array]]
"""Residuals of `Stages.first` and of a chunk."""


@dataclass(frozen=True)
class ForwardBackward:
    """The two passes of `split_passes`.

    Attributes:
      closed_jaxpr: jaxpr of the forward pass: from the flat arguments to its results and then its
        residuals.
      results: the tree structure of the results.
      vjp_tree: the tree structure of the VJP function.
      stored: the residuals that are stored, as indices of the program's outputs.
      output_indices: of each residual, its index in the program's outputs.
    """

    closed_jaxpr: Any
    results: Any
    vjp_tree: Any
    stored: tuple[int, ...]
    output_indices: tuple[int, ...]

    def forward(self, shared: Tree, x: Tree, *others: Tree) -> tuple[Any, list[Array]]:
        """Forward pass: ``((out, aux), residuals)``."""
        num_results = self.results.num_leaves
        indices = [*range(num_results), *self.stored]
        outs = self._evaluate(jax.tree.leaves((shared, x, *others)), indices)
        return self.results.unflatten(outs[:num_results]), outs[num_results:]

    def backward(self, shared: Tree, residuals: list[Array], gradient: Tree) -> tuple[Tree, Tree]:
        """Backward pass: the gradients of the weights and of `x`, from the gradient of `out`."""
        recomputed = sorted(set(self.output_indices) - set(self.stored))
        values = dict(zip(self.stored, residuals, strict=True))
        values |= zip(recomputed, self._evaluate(jax.tree.leaves(shared), recomputed), strict=True)
        return self.vjp_tree.unflatten([values[index] for index in self.output_indices])(gradient)

    def _evaluate(self, args: list[Array], indices: list[int]) -> list[Array]:
        """Outputs of ascending indices, from the flat arguments that they depend on (or more)."""
        pruned, is_used = _prune_jaxpr(self.closed_jaxpr.jaxpr, indices)
        return core.eval_jaxpr(pruned, self.closed_jaxpr.consts, *compress(args, is_used))


def split_passes(
    function: Callable[..., Any], shared: Tree, x: Tree, *others: Tree
) -> ForwardBackward:
    """Splits ``function((weights, ...), x, *others) -> (out, aux)`` into forward and backward pass.

    The backward pass is that to the weights and to `x`. The arguments are examples: arrays of the
    types that the passes will receive.

    Args:
      function: the function to differentiate.
      shared: the weights, then other inputs that are available in the backward pass too.
      x: input to differentiate besides the weights; may be empty.
      others: inputs that get no gradient.
    """
    structure: Any = None

    def run(shared: Any, x: Any, *others: Any) -> Any:
        nonlocal structure
        weights, *constants = shared
        out, vjp_fn, aux = jax.vjp(
            lambda weights, x: function((weights, *constants), x, *others), weights, x, has_aux=True
        )
        residuals, structure = jax.tree.flatten(vjp_fn)
        return (out, aux), residuals

    closed_jaxpr, (results, _) = jax.make_jaxpr(run, return_shape=True)(shared, x, *others)
    num_results, num_shared = len(jax.tree.leaves(results)), len(jax.tree.leaves(shared))
    first_index: dict[int, int] = {}
    # A residual that occurs twice is stored once.
    output_indices = [
        first_index.setdefault(id(variable), num_results + index)
        for index, variable in enumerate(closed_jaxpr.jaxpr.outvars[num_results:])
    ]
    depends = _dependence_predicate(closed_jaxpr.jaxpr, num_shared)
    stored = [index for index in sorted(set(output_indices)) if depends(index)]
    return ForwardBackward(
        closed_jaxpr,
        jax.tree.structure(results),
        structure,
        tuple(stored),
        tuple(output_indices),
    )


def _dependence_predicate(jaxpr: Any, num_shared: int) -> Callable[[int], bool]:
    """Predicate of an output's index: true if it depends on more than the leading inputs."""
    reached = {id(variable) for variable in jaxpr.invars[num_shared:]}
    mixed = set()
    for equation in jaxpr.eqns:
        if any(id(variable) in reached for variable in equation.invars):
            reached |= {id(variable) for variable in equation.outvars}
            # A loop or a branch: each of its outputs may depend on a subset of the inputs.
            if len(equation.outvars) > 1:
                mixed |= {id(variable) for variable in equation.outvars}

    def depends(index: int) -> bool:
        variable = id(jaxpr.outvars[index])
        if variable not in reached or variable not in mixed:
            return variable in reached
        return any(_prune_jaxpr(jaxpr, [index])[1][num_shared:])

    return depends


def _prune_jaxpr(jaxpr: Any, indices: list[int]) -> tuple[Any, list[bool]]:
    """Dead-code elimination: the jaxpr of a subset of the outputs, and a mask of used inputs."""
    wanted = set(indices)
    return dce_jaxpr(jaxpr, [index in wanted for index in range(len(jaxpr.outvars))])


class Sums(NamedTuple):
    """Accumulators of `gradients`.

    Attributes:
      loss: loss of this stage's chunks and, on the last stage, of `Stages.last`.
      embed_and_head: this stage's part of the gradient of embedding and head, float32.
      layers: the gradient of this stage's layers, ``[chunk, ...]``, float32.
      metrics: metrics of `Stages.last`, ``[micro_batch, ...]``, equal on all stages.
      statistics: statistics of this stage's chunks, ``[chunk, ...]``.
    """

    loss: Array
    embed_and_head: Tree
    layers: Tree
    metrics: Tree
    statistics: Tree


def apply(
    stages: Stages, embed_and_head: Tree, layers: Tree, micro_batches: Tree, pipeline: Pipeline
) -> tuple[Tree, Tree]:
    """Forward pass of all micro-batches.

    Communication per tick: one activation to the next stage.

    Args:
      stages: the network; the loss and metrics of `last` may be anything.
      embed_and_head: weights of `first` and `last`, on every stage.
      layers: weights of this stage's chunks, ``[chunk, ...]``.
      micro_batches: inputs ``[micro_batch, ...]``, on every stage.

    Returns:
      The results of `stages.last`, ``[micro_batch, ...]``, equal on all stages; and the statistics
      of this stage's chunks, ``[chunk, ...]``.
    """
    run = Run(stages, embed_and_head, layers, micro_batches, pipeline)

    def tick(carry, now):
        received, outs, sums = carry
        work = run.schedule.forward_only(now, run.stage)
        x = run.chunk_input(work, received)

        def leave(outs, x):
            return set_at(
                outs, work.micro_batch, stages.last(embed_and_head, x, run.micro_batch(work))
            )

        def run_chunk(outs, sums):
            micro_batch, number = run.micro_batch(work), run.chunk_index(work)
            after, _, statistics = stages.chunk(run.layers_of(work), x, micro_batch, number)
            after = vary(after, pipeline.everywhere)
            outs = lax.cond(run.is_last_chunk(work), leave, lambda outs, _: outs, outs, after)
            return after, outs, add_at(sums, work.chunk, statistics)

        after, outs, sums = lax.cond(
            work.active, run_chunk, lambda *rest: (run.no_x, *rest), outs, sums
        )
        return (run.send(after), outs, sums), None

    initial = (run.no_x, repeat_tree(run.no_out, run.schedule.num_micro_batches), run.no_statistics)
    (_, outs, sums), _ = lax.scan(tick, initial, jnp.arange(run.schedule.forward_ticks))
    # All stages but the last hold zeros: the sum broadcasts its results.
    return all_sum(outs, pipeline.stage), sums


def gradients(
    stages: Stages, embed_and_head: Tree, layers: Tree, micro_batches: Tree, pipeline: Pipeline
) -> Sums:
    """Loss of all micro-batches and its gradient.

    Every chunk runs forward once and backward once. Between the two a stage keeps the residuals
    that `jax.vjp` of `Stages.chunk` needs, of as many chunks as are in flight simultaneously
    (`Schedule.slots`). Residuals that depend on weights only are recomputed. Residuals of
    `Stages.first` are kept likewise, on every stage, because all run one program.

    Communication per tick: one activation to the next stage, or one gradient to the one before.

    Args: as `apply`. Weights must vary over all mesh axes: a gradient is then this device's own.
    """
    run = Run(stages, embed_and_head, layers, micro_batches, pipeline)
    schedule = run.schedule
    passes = Passes(run)

    def tick(carry, _):
        now, x, grad, residuals, sums = carry
        work = schedule.forward(now, run.stage)
        slots = passes.slots_of(work)
        # The condition's operands are what it may change, as all others would be copied through.
        after, grad, new_residuals, metrics, forward_sums = lax.cond(
            work.active,
            lambda x, grad, residuals, sums: passes.forward(
                work, x, grad, tuple(map(index_tree, residuals, slots)), sums
            ),
            lambda _, grad, residuals, sums: (
                *(run.no_x, grad, tuple(map(index_tree, residuals, slots)), run.no_out[1], sums),
            ),
            *(x, grad, residuals, sums._replace(layers=None, metrics=None)),
        )
        residuals = tuple(map(store_at, residuals, slots, new_residuals))
        back = schedule.backward(now, run.stage)
        before, embed_and_head, layers = lax.cond(
            back.active,
            lambda *operands: passes.backward(back, *operands),
            lambda grad, residuals, embed_and_head, layers: (run.no_x, embed_and_head, layers),
            *(grad, residuals, forward_sums.embed_and_head, sums.layers),
        )
        # Zeros but for the micro-batch that left.
        metrics = add_at(sums.metrics, work.micro_batch, metrics)
        sums = forward_sums._replace(embed_and_head=embed_and_head, layers=layers, metrics=metrics)
        # Outside of all conditions but that on time: a permute is a collective of all stages, with
        # or without work.
        x, received = run.exchange(now, after, before, x, grad)
        # The last chunk's gradient is not received: it waits on this stage for its backward pass.
        grad = jnp.where(work.active & run.is_last_chunk(work), grad, received)
        return (now + 1, x, grad, residuals, sums), None

    zero_sums = Sums(
        loss=run.no_loss,
        embed_and_head=run.zero_gradients(embed_and_head),
        layers=run.zero_gradients(layers),
        metrics=repeat_tree(run.no_out[1], schedule.num_micro_batches),
        statistics=run.no_statistics,
    )
    initial = (jnp.zeros((), jnp.int32), run.no_x, run.no_x, passes.no_residuals(), zero_sums)
    (*_, sums), _ = lax.scan(tick, initial, length=schedule.ticks)
    return sums._replace(metrics=all_sum(sums.metrics, pipeline.stage))


class Passes:
    """Forward and backward passes of `Stages.first` and of a chunk, and their residual buffers.

    Attributes:
      first, chunk: `Stages.first` and `Stages.chunk`.
      slots: buffer slots of the residuals of each, ``[micro_batch, chunk]``.
      types: zeros of the types of one slot's residuals of each.
    """

    def __init__(self, run: Run):
        self.run = run
        micro_batch, everywhere = index_tree(run.micro_batches, 0), run.pipeline.everywhere

        def through_first(shared, _, micro_batch):
            (embed_and_head,) = shared
            return vary(run.stages.first(embed_and_head, micro_batch), everywhere), None

        def through_chunk(shared, x, micro_batch):
            layers, chunk_index = shared
            x, loss, statistics = run.stages.chunk(layers, x, micro_batch, chunk_index)
            return (vary(x, everywhere), vary_like(loss, run.no_chunk_loss)), statistics

        def split(function: Callable[..., Any], *args: Tree) -> tuple[ForwardBackward, list[Array]]:
            passes = split_passes(function, *args)
            return passes, zeros_of(run.pipeline, lambda: passes.forward(*args)[1])

        shared = index_tree(run.layers, 0), run.stage
        self.first, of_first = split(through_first, (run.embed_and_head,), (), micro_batch)
        self.chunk, of_chunk = split(through_chunk, shared, run.no_x, micro_batch)
        self.types: Residuals = of_first, of_chunk
        self.slots = run.schedule.slots([0]), run.schedule.slots()

    def no_residuals(self) -> Residuals:
        """Initial residual buffers, zeros."""
        num_first, num_chunk = (max(map(max, slots)) + 1 for slots in self.slots)
        return repeat_tree(self.types[0], num_first), repeat_tree(self.types[1], num_chunk)

    def forward(
        self, work: Work, x: Array, grad: Array, before: Residuals, sums: Sums
    ) -> tuple[Array, Array, Residuals, Tree, Sums]:
        """Forward pass of one chunk, with `Stages.first` before the first, `last` after the last.

        `x` and `grad` were received: the input, except for the first chunk, and the gradient for
        the next backward pass. `before` are the residuals in the slots of this chunk; `layers` and
        `metrics` of the sums are None.

        Returns:
          The chunk's output; `grad`, after the last chunk the gradient of its output; the residuals
          for these slots; the metrics of `Stages.last` or zeros; and the sums.
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
        residuals = first_residuals, vary_like(chunk_residuals, self.types[1])
        return after, grad, residuals, metrics, sums

    def backward(
        self, work: Work, grad: Array, residuals: Residuals, embed_and_head: Tree, layers: Tree
    ) -> tuple[Array, Tree, Tree]:
        """Backward pass of one chunk, and for the first chunk also of `Stages.first`.

        From the gradient of the chunk's output, the buffers of residuals and the sums of gradients
        (`Sums.embed_and_head`, `Sums.layers`) to the gradient of its input, and these sums.
        """
        run, slots = self.run, self.slots_of(work)
        shared = run.layers_of(work), run.chunk_index(work)
        # Each chunk has its own part of the loss (the router's), hence a cotangent of one besides
        # the received gradient.
        unit_cotangent = vary_like(jnp.ones_like(run.no_chunk_loss), run.no_chunk_loss)
        layer_gradient, grad = self.chunk.backward(
            shared, index_tree(residuals[1], slots[1]), (grad, unit_cotangent)
        )
        # Else XLA stacks the gradients of unrolled layers in the dtype of the sum, which takes
        # twice the memory where weights are bfloat16.
        layer_gradient = jax.tree.map(lax.optimization_barrier, layer_gradient)

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
        embed_and_head, grad = vjp_fn(vary_like(jnp.ones_like(loss), loss))
        sums = sums._replace(
            loss=sums.loss + vary_like(loss, sums.loss),
            embed_and_head=add_trees(sums.embed_and_head, embed_and_head),
        )
        return grad, vary_like(metrics, run.no_out[1]), sums
