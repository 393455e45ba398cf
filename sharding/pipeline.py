"""Pipeline parallelism: micro-batches through the stages, inside the one `jax.shard_map`.

`apply` runs the forward pass, `gradients` forward and backward, both by
`sharding.schedule.Schedule`. The caller defines a chunk of layers, embedding and head as `Stages`.
A tick in which a stage has no work is skipped by `lax.cond`, not computed and masked. The condition
is equal on all devices of a stage, so collectives over groups inside a stage are legal in it. A
collective-permute is not: it is one operation of all devices of the program. Ring attention
therefore uses exchanges in groups here (`moe.attention.ring_schedule`), and activations and
gradients are sent from stage to stage outside of these conditions.
"""

import jax.numpy as jnp
from jax import lax

from sharding.collectives import all_sum
from sharding.passes import Passes, Sums
from sharding.stage import (
    Pipeline,
    Run,
    Stages,
    Tree,
    add_at,
    index_each,
    repeat_tree,
    set_at,
    store_at,
)


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
    run = Run.build(stages, embed_and_head, layers, micro_batches, pipeline)

    def tick(carry, now):
        received, outs, sums = carry
        work = run.schedule.forward_only(now, run.stage)
        x = run.chunk_input(work, received)

        def leave(outs, x):
            return set_at(
                outs, work.micro_batch, stages.last(embed_and_head, x, run.micro_batch(work))
            )

        def run_chunk(outs, sums):
            after, _, statistics = run.chunk(run.layers_of(work), x, work)
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
    (`Schedule.slots`). Residuals that depend on weights only are recomputed. Those of
    `Stages.first` are kept likewise, on every stage, because all run one program.

    Communication per tick: one activation to the next stage, or one gradient to the one before.

    Args: as `apply`. Weights must vary over all mesh axes: a gradient is then this device's own.
    """
    run = Run.build(stages, embed_and_head, layers, micro_batches, pipeline)
    schedule = run.schedule
    passes = Passes.build(run)

    def tick(carry, _):
        now, x, grad, residuals, sums = carry
        work = schedule.forward(now, run.stage)
        slots = passes.slots_of(work)
        # The condition's operands are what it may change, as all others would be copied through.
        after, grad, new_residuals, metrics, forward_sums = lax.cond(
            work.active,
            lambda x, grad, residuals, sums: passes.forward(
                work, x, grad, index_each(residuals, slots), sums
            ),
            lambda _, grad, residuals, sums: (
                *(run.no_x, grad, index_each(residuals, slots), run.no_out[1], sums),
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
