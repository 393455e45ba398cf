"""Jitted update that policy, critic and warm start share.

Gradients are computed inside the `jax.shard_map`, micro-batch after micro-batch with the
denominators of the whole mini-batch, summed over devices once, and applied outside it on global
arrays. Devices with the same weights each keep a shard of the gradient and of the optimizer state
(`sharding.zero`), update that shard, and gather the new weights; under `Execution.fsdp` they keep a
shard of the weights too, and gather each layer when it runs. For weights in bfloat16 the updated
shard is one of float32 masters (`jrl.trainer.learner.learner`), and gradients are those of the
bfloat16 weights, summed over micro-batches and devices in float32. In a network with adapters only
these have gradients and are updated; the base weights are frozen.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.batch import Batch, Totals
from jrl.recipes.base.optimizer import Optimizer
from jrl.trainer.learner.learner import (
    Learner,
    cast_and_gather,
    constrain_sharding,
    keeps_masters,
    split,
    state_shardings,
    transformation,
)
from jrl.trainer.scoring import Scorer, scan_first
from moe import model, placement, stages
from moe.adapters import combine_trees
from moe.router.balance import router_loss, with_updated_bias
from moe.router.statistics import RouterStatistics
from moe.weights import Layer, Transformer, without_layers
from sharding import zero
from sharding.collectives import Axes, all_sum, vary
from sharding.sharded_jit import MeshJit
from sharding.zero import Reduced, Reduction

Loss = Callable[[Transformer[Any], Any], tuple[Array, Any]]
"""(trained weights, some of them in a `Reduced`, micro-batch) -> the loss of the micro-batch and
its metrics."""

Leaf = TypeVar("Leaf")


@struct.dataclass
class Max(Generic[Leaf]):
    """Metric that is a maximum over micro-batches, as `jrl.losses.Mean` is a mean."""

    maximum: Leaf

    def value(self) -> Leaf:
        return self.maximum


@dataclass(frozen=True)
class Objective(Scorer):
    """Loss on a micro-batch, run inside the `jax.shard_map`. Hashable: compiled once each."""

    def loss(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Array, dict[str, Any]]:
        """Share of the loss and metrics of a micro-batch, equal on all ranks of ``cp`` and ``tp``,
        from the last hidden states `x`. The routers' losses are added to it.

        Args:
          totals: of the whole mini-batch.
        """
        raise NotImplementedError

    def router_metrics(self, router: RouterStatistics[Array] | None) -> dict[str, Any]:
        """Metrics of the routers' sums over all layers: `load`, ``[layer, route]`` tokens per
        expert on all ranks of ``cp`` and ``tp``, which updates the selection bias."""
        return {} if router is None else {"load": all_sum(router.load, self.mesh.sequence)}


def count(batch: Batch[Array], statistics: Any = None) -> Totals[Array]:
    """Totals of a mini-batch: its denominators, and the recipe's `statistics`."""
    mask = batch.mask
    correct = mask if batch.correct is None else mask & batch.correct[:, None]
    # Integers, whatever the masks are: float32 counts no further than 2^24 one by one.
    return Totals(
        num_tokens=jnp.sum(mask, dtype=jnp.int32),
        num_sequences=jnp.sum(jnp.any(mask, axis=1), dtype=jnp.int32),
        num_correct_tokens=jnp.sum(correct, dtype=jnp.int32),
        num_valid=jnp.sum(batch.valid, dtype=jnp.int32),
        statistics=statistics,
    )


# The learner is donated: new weights and moments reuse the buffers of the old ones. Frozen weights
# are not donated: every step gets the same arrays.
@partial(MeshJit, static_argnums=(0, 1, 2), donate_argnums=3)
def update(
    objective: Objective,
    optimizer: Optimizer,
    num_micro_batches: int,
    learner: Learner[Array],
    batch: Batch[Array],
    statistics: Any = None,
    passes: Array | None = None,
    frozen: Transformer[Array] | None = None,
) -> tuple[Learner[Array], dict[str, Any]]:
    """Runs one optimizer step on a mini-batch.

    Where the loss or the gradient's norm is not finite, nothing changes and the step is counted as
    skipped. Nothing changes either where the loss mask of the mini-batch is empty: momentum, weight
    decay and the routers' losses would act without any training signal. Nor does anything change,
    without counting as skipped, where the expert buffers overflowed (`Execution.buffer_factor`):
    the caller has to update again with dropless buffers.

    Args:
      num_micro_batches: micro-batches the mini-batch is split into on each device.
      learner: donated.
      batch: the mini-batch, rows over ``dp``.
      statistics: statistics of the whole mini-batch for the loss, in addition to its counts.
      passes: ``[]`` number of micro-batches to run, the first ones; the others have no tokens.
        None runs all.
      frozen: the frozen weights of a network with adapters; those of `learner` are the others then
        (`moe.adapters`), before and after.

    Returns:
      The learner, and metrics: `loss`, `grad_norm`, `finite`, `empty` and the objective's; and
      under a `buffer_factor` `overflow`, the number of routed rows that overflowed.
    """
    config, mesh = objective.config, objective.mesh
    shards, _ = split(placement.shard_specs(config, mesh), config)
    # Denominators of the whole mini-batch, computed before it is split: micro-batches are summed.
    totals = count(batch, statistics)
    loss, grads, metrics = _gradients(
        objective,
        optimizer.gradient_wire,
        num_micro_batches,
        weights=learner.weights,
        frozen=frozen,
        batch=batch,
        totals=totals,
        passes=passes,
    )
    # Of global arrays, so it is the global norm, whatever the layout, as clipping requires.
    grad_norm = optax.tree.norm(grads)
    # A NaN or an infinity anywhere in the gradient is one in its norm.
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    empty = totals.num_tokens == 0
    # ZeRO-1: each device updates the shard whose moments it keeps; the all-gather comes after.
    # `Any`, as optax's types do not include dataclasses.
    weights: Any = constrain_sharding(learner.float32_weights, shards, mesh)
    # Masters take the place of the cast weights, which are cast from them again after the step.
    learner = replace(learner, weights=weights, masters=None)
    # Optax relies on the standard promotions, which a caller may have disabled.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        optimizer_updates, opt_state = transformation(optimizer).update(
            grads, learner.opt_state, weights
        )
    # In float32, so that a step below the rounding error of a bfloat16 weight is not lost.
    new_weights: Any = optax.apply_updates(weights, optimizer_updates)
    # DeepSeek-V3's auxiliary-loss-free balancing: the bias is no parameter of the optimizer.
    if config.selection_bias and frozen is None:
        rate = config.bias_update_rate
        new_weights = with_updated_bias(weights, new_weights, metrics["load"], rate, mesh)
    updated = replace(
        learner,
        weights=new_weights,
        opt_state=opt_state,
        updates=learner.updates + 1,
        skipped_in_a_row=jnp.zeros_like(learner.skipped_in_a_row),
    )
    # After an overflow the gradient is that of another routing than the routers': it is recomputed
    # (`Network.update`), and does not count as a skipped update.
    fits = metrics["overflow"] == 0 if "overflow" in metrics else jnp.ones((), bool)
    skipped = (~finite & fits).astype(learner.skipped.dtype)
    unchanged = replace(
        learner,
        skipped=learner.skipped + skipped,
        skipped_in_a_row=learner.skipped_in_a_row + skipped,
    )
    # Selected on the device: the host need not block on the outcome.
    applies = finite & ~empty & fits
    learner = jax.tree.map(lambda new, old: jnp.where(applies, new, old), updated, unchanged)
    learner = replace(
        learner,
        # After the selection between moved and stayed, which is then done on shards only.
        weights=cast_and_gather(learner.weights, config, mesh),
        masters=learner.weights if keeps_masters(config) else None,
        # Sharded as the input, so that it fits the donated buffers.
        opt_state=jax.lax.with_sharding_constraint(
            learner.opt_state, state_shardings(learner.opt_state, config, mesh)
        ),
    )
    metrics |= {"loss": loss, "grad_norm": grad_norm, "finite": finite, "empty": empty}
    return learner, metrics


def _gradients(
    objective: Objective,
    comm_dtype: str,
    num_micro_batches: int,
    weights: Transformer[Array],
    frozen: Transformer[Array] | None,
    batch: Batch[Array],
    totals: Totals[Array],
    passes: Array | None,
) -> tuple[Array, Any, dict[str, Any]]:
    """Loss of a mini-batch, its sharded gradient and its metrics, on global arrays."""
    config, mesh, replicated = objective.config, objective.mesh, PartitionSpec()
    trained_specs, frozen_specs = split(placement.stored_specs(config, mesh), config)
    local = jax.shard_map(
        partial(_local_gradients, objective, comm_dtype, num_micro_batches),
        mesh=mesh.mesh,
        in_specs=(
            trained_specs,
            None if frozen is None else frozen_specs,
            PartitionSpec(mesh.dp),
            *[replicated] * 2,
        ),
        out_specs=(replicated, split(placement.shard_specs(config, mesh), config)[0], replicated),
    )
    return local(weights, frozen, batch, totals, passes)


def _local_gradients(
    objective: Objective,
    comm_dtype: str,
    num_micro_batches: int,
    weights: Transformer[Array],
    frozen: Transformer[Array] | None,
    batch: Batch[Array],
    totals: Totals[Array],
    passes: Array | None,
) -> tuple[Array, Transformer[Array], dict[str, Any]]:
    """Loss of a mini-batch, this device's shard of its gradient and its metrics."""
    config, mesh = objective.config, objective.mesh
    all_dims = placement.shard_dims(config, mesh, comm_dtype)
    shard_dims, frozen_dims = split(all_dims, config)
    specs, _ = split(placement.specs(config, mesh), config)
    fsdp = config.execution.fsdp
    # Typed as varying over every axis, they get the gradient of this device only; the sum over
    # micro-batches is summed over devices once.
    local_weights, frozen = vary((weights, frozen), mesh.axes)
    if fsdp:
        # Layers stay sharded until they run, and their gradients are reduced there.
        local_weights = replace(
            zero.unshard(local_weights, shard_dims), layers=local_weights.layers
        )
        if frozen is not None:
            frozen = replace(zero.unshard(frozen, frozen_dims), layers=frozen.layers)
    # Rows of this `dp` rank only: splitting them needs no communication.
    # Consecutive rows: samples of a prompt stay in one micro-batch if possible, and share it.
    micro_batches = jax.tree.map(lambda x: x.reshape(num_micro_batches, -1, *x.shape[1:]), batch)
    layer_shard_dims = all_dims.layers if fsdp else None
    reductions = jax.tree.map(partial(Reduction, mesh), specs, shard_dims)
    if fsdp:
        # The transpose of a layer's gather has reduce-scattered its gradient already.
        in_shards = partial(replace, is_sharded=True)
        reductions = replace(reductions, layers=jax.tree.map(in_shards, reductions.layers))
    # A pipeline interleaves several micro-batches.
    if mesh.layout.pp > 1:
        assert passes is None, "a pipeline runs all micro-batches in one pass"
        loss, grads, metrics = _pipeline_gradients(
            objective, local_weights, frozen, micro_batches, totals, layer_shard_dims
        )
        return loss, jax.tree.map(Reduction.__call__, reductions, grads), metrics

    def micro_batch_loss(local_weights, micro_batch):
        micro_batch = vary(micro_batch, mesh.except_sequence)
        weights = local_weights if frozen is None else combine_trees(frozen, local_weights)
        x, router = model.run(weights, objective.pack(micro_batch), config, mesh, layer_shard_dims)
        loss, metrics = objective.loss(weights, x, micro_batch, totals)
        loss = loss + router_loss(router, config, mesh, totals.num_valid)
        # Ranks of cp and tp have the same loss, which counts once.
        metrics = {**metrics, **_router_metrics(objective, router)}
        return all_sum(loss, mesh.except_sequence), metrics

    # A scan holds the activations of one micro-batch.
    if config.execution.overlap_grad_reduce:
        loss, grads, metrics = accumulate_with_overlapped_reduction(
            micro_batch_loss, local_weights, reductions, micro_batches, passes, mesh.axes
        )
    else:
        loss, grads, metrics = accumulate_gradients(
            micro_batch_loss, local_weights, micro_batches, passes, mesh.axes
        )
        grads = jax.tree.map(Reduction.__call__, reductions, grads)
    return loss, grads, _reduce_metrics(metrics, mesh.except_sequence)


def _pipeline_gradients(
    objective: Objective,
    local_weights: Transformer[Array],
    frozen: Transformer[Array] | None,
    micro_batches: Batch[Array],
    totals: Totals[Array],
    shard_dims: Layer[zero.ShardDim] | None,
) -> tuple[Array, Transformer[Array], dict[str, Any]]:
    """Loss, this device's gradient, and metrics, on a pipeline."""
    config, mesh = objective.config, objective.mesh
    loss, grads, metrics, router = stages.gradients(
        local_weights,
        vary(micro_batches, mesh.except_sequence),
        stages.Ends(
            objective.pack,
            lambda weights, x, micro_batch: objective.loss(weights, x, micro_batch, totals),
            totals.num_valid,
        ),
        config,
        mesh,
        shard_dims,
        frozen,
    )
    # Already summed over micro-batches: a stack of one.
    router_metrics = jax.tree.map(lambda x: x[None], _router_metrics(objective, router))
    # Stages have the same metrics, which count once, and each its own share of the loss.
    metric_axes = tuple(axis for axis in mesh.except_sequence if axis not in mesh.pp)
    metrics = _reduce_metrics({**metrics, **router_metrics}, metric_axes)
    return all_sum(loss, mesh.except_sequence), grads, metrics


def _router_metrics(objective: Objective, router: RouterStatistics[Array] | None) -> dict[str, Any]:
    metrics = objective.router_metrics(router)
    if router is None or router.overflow is None:
        return metrics
    return metrics | {"overflow": all_sum(router.overflow, objective.mesh.sequence)}


def _reduce_metrics(metrics: dict[str, Any], axes: Axes) -> dict[str, Any]:
    """Reduces metrics that are stacked over micro-batches, over them and the devices of `axes`."""

    def reduce(metric: Any) -> Any:
        if isinstance(metric, Max):
            return Max(jax.lax.pmax(jnp.max(vary(metric.maximum, axes)), axes))
        return jax.tree.map(lambda x: all_sum(jnp.sum(x, axis=0), axes), metric)

    return {name: reduce(metric) for name, metric in metrics.items()}


def accumulate_gradients(
    loss_of: Loss,
    local_weights: Transformer[Array],
    micro_batches: Any,
    passes: Array | None,
    axes: Axes,
) -> tuple[Array, Transformer[Array], Any]:
    """Accumulates loss and gradient of this device over micro-batches; returns these sums, and the
    metrics of each micro-batch.

    Args:
      local_weights: trained weights, varying over `axes`, all those of the mesh.
      micro_batches: inputs ``[micro_batch, ...]``.
      passes: number of micro-batches to run, as in `scan_first`.
    """
    # In float32 whatever the weights are: a bfloat16 sum of hundreds would lose further addends.
    # The carry varies over every axis, as gradients do: a scan keeps the types of its carry.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), local_weights)
    zero_sums = (jnp.zeros((), jnp.float32), vary(zeros, axes))

    def add_micro_batch(total, micro_batch):
        loss_before, grads_before = total
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(
            local_weights, micro_batch
        )
        summed = jax.tree.map(lambda total, x: total + x.astype(total.dtype), grads_before, grads)
        return (loss_before + loss, summed), metrics

    (loss, grads), metrics = scan_first(add_micro_batch, zero_sums, micro_batches, passes)
    return loss, grads, metrics


def accumulate_with_overlapped_reduction(
    loss_of: Loss,
    local_weights: Transformer[Array],
    reductions: Transformer[Any],
    micro_batches: Any,
    passes: Array | None,
    axes: Axes,
) -> tuple[Array, Transformer[Array], Any]:
    """Accumulates gradients as `accumulate_gradients`, and sums them over devices, overlapped with
    the backward pass: each layer's as soon as the last micro-batch has computed it.

    The last micro-batch is outside of the loop over the others, and compiled in addition. Sums are
    in the same order: the values are those of `accumulate_gradients`, except where the compiler
    fuses the last micro-batch differently and rounds once less.

    Args:
      reductions: a `sharding.zero.Reduction` for each weight of `local_weights`.
      passes: at least 1.
    """
    num_micro_batches = jax.tree.leaves(micro_batches)[0].shape[0]
    # None is an empty sum: the gradient of a single micro-batch is not added to zeros.
    loss = jnp.zeros((), jnp.float32)
    total = jax.tree.map(lambda _: None, local_weights)
    metrics = None
    if num_micro_batches > 1:
        other_micro_batches = jax.tree.map(lambda x: x[:-1], micro_batches)
        other_passes = None if passes is None else passes - 1
        loss, total, metrics = accumulate_gradients(
            loss_of, local_weights, other_micro_batches, other_passes, axes
        )
    # The last micro-batch that runs: gradients are summed over devices once, when complete.
    last_index = num_micro_batches - 1 if passes is None else passes - 1
    last = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, last_index, keepdims=False), micro_batches
    )
    zeros = jax.tree.map(Reduction.sum_zeros, reductions, local_weights)

    def wrap(reduction: Reduction, weight: Array, before: Array | None, zeros: Array) -> Any:
        return Reduced(weight, before, zeros, reduction)

    # Differentiated by these zeros, not by the layers: their cotangent is the sum over devices of
    # the layers' gradient (`sharding.zero`).
    def last_loss(differentiated: Transformer[Array]) -> tuple[Array, Any]:
        wrapped = jax.tree.map(wrap, reductions, local_weights, total, differentiated)
        return loss_of(_with_layers(differentiated, wrapped), last)

    (last_value, last_metrics), grads = jax.value_and_grad(last_loss, has_aux=True)(
        _with_layers(local_weights, zeros)
    )

    def reduce_gradient(reduction: Reduction, gradient: Array, before: Array | None) -> Array:
        # As `accumulate_gradients` does it: widened first, added, and then summed over devices.
        gradient = gradient.astype(jnp.float32)
        return reduction(gradient if before is None else before + gradient)

    reduced = jax.tree.map(reduce_gradient, *map(without_layers, (reductions, grads, total)))
    if metrics is None:
        metrics = jax.tree.map(lambda x: x[None], last_metrics)
    else:
        metrics = jax.tree.map(partial(_insert_metric, last_index), metrics, last_metrics)
    return loss + last_value, _with_layers(reduced, grads), metrics


def _with_layers(weights: Transformer[Any], layers_of: Transformer[Any]) -> Transformer[Any]:
    """`weights` with the layers of another network."""
    return replace(weights, layers=layers_of.layers, first_layers=layers_of.first_layers)


def _insert_metric(index: int | Array, others: Array, last: Array) -> Array:
    """Inserts the metric of the last micro-batch at `index` among those of the others, which are
    zeros from there on."""
    padded = jnp.concatenate([others, jnp.zeros_like(others[:1])])
    return lax.dynamic_update_index_in_dim(padded, last, index, 0)
