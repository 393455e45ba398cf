"""Objectives of the networks (the losses of policy and critic), and the jitted update that
minimises one of them.

Gradients are computed inside the `jax.shard_map`, micro-batch after micro-batch with the
denominators of the whole mini-batch, summed over devices once, and applied outside it on global
arrays. Devices with the same weights each keep a shard of the gradient and of the optimizer state
(`sharding.zero`), update that shard, and gather the new weights; under `Execution.fsdp` they keep a
shard of the weights too, and gather each layer when it runs. For weights in bfloat16 the updated
shard is one of float32 masters (`jrl.trainer.learner.learner`), and gradients are taken of
the bfloat16 weights, summed over micro-batches and devices in float32. In a network with adapters
only these have gradients and are updated; the base weights are frozen.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from jrl.losses import Mean, aggregate, kl_estimate, mismatch_statistics
from jrl.recipes.base.batch import Batch, Totals, required
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.recipe import Metrics, Recipe
from jrl.trainer.learner.accumulation import (
    accumulate_gradients,
    accumulate_with_overlapped_reduction,
)
from jrl.trainer.learner.learner import (
    Learner,
    cast_and_gather,
    constrain_sharding,
    init_learner,
    keeps_masters,
    split,
    state_shardings,
    transformation_of,
)
from jrl.trainer.learner.metrics import (
    ExpertLoad,
    FirstUpdate,
    Max,
    Outcome,
    as_metric,
    reduce_metric,
)
from jrl.trainer.learner.synchronous import warn_if_synchronous
from jrl.trainer.scoring import RetryOnOverflow, Scorer, logprobs_and_entropy_of
from moe import model, placement, stages
from moe.adapters import combine_trees
from moe.config import Model, ModelConfig
from moe.router.balance import router_loss, with_updated_bias
from moe.router.statistics import RouterStatistics, run_with_fallback
from moe.weights import Layer, Transformer
from sharding import zero
from sharding.collectives import Axes, all_sum, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import MeshJit
from sharding.zero import Reduction


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

    def router_metrics(self, router: RouterStatistics[Array]) -> dict[str, Any]:
        """Metrics of the routers' sums over all layers and all ranks of ``cp`` and ``tp``."""
        return {}


def policy_loss(
    recipe: Recipe,
    logprobs: Float[Array, "batch time"],
    entropy: Float[Array, "batch time"],
    batch: Batch[Array],
    totals: Totals[Array],
    response_length: int,
) -> tuple[Float[Array, ""], Metrics]:
    """Micro-batch's share of the policy's loss of its mini-batch.

    ``aggregate(w surrogate) - entropy_coef aggregate(entropy) + kl_coef aggregate(k3) + auxiliary``
    with the recipe's surrogate, denominators and auxiliary loss, and importance weights w.

    Args:
      logprobs: of the current policy, nats.
      entropy: of the current policy's distribution over each token, nats.
      batch: any micro-batch of the mini-batch.
      totals: of the whole mini-batch.
      response_length: the limit of a completion, in tokens.
    """

    def reduced(per_token: Float[Array, "batch time"]) -> Float[Array, ""]:
        # Of the whole mini-batch: a mean of micro-batches' means would give tokens of short
        # micro-batches a larger weight.
        denominators = recipe.denominators(totals, response_length)
        return aggregate(per_token, batch.mask, recipe.aggregation, **denominators)

    # So that a recipe need not mask its sums.
    logprobs, entropy = (jnp.where(batch.mask, x, 0.0) for x in (logprobs, entropy))
    surrogate, metrics = recipe.surrogate(logprobs, entropy, batch, totals.statistics)
    if batch.importance_weights is not None:
        surrogate = surrogate * jax.lax.stop_gradient(batch.importance_weights)
    # With denominators of the mini-batch this is a share: shares are summed over micro-batches and
    # rows of `dp`.
    loss = reduced(surrogate)
    metrics = {f"actor/{name}": value for name, value in metrics.items()}
    metrics["actor/pg_loss"] = loss
    metrics["actor/entropy"] = Mean.of(entropy, batch.mask)
    if recipe.entropy_coef is not None:
        loss = loss - recipe.entropy_coef * reduced(entropy)
    if recipe.kl_coef is not None:
        # k3 is 0 or more at every token; k1, minimised, would fall without bound.
        kl = kl_estimate(logprobs, required(batch.reference_logprobs), batch.mask, kind="k3")
        loss = loss + recipe.kl_coef * reduced(kl)
        metrics["actor/kl_loss"] = Mean.of(kl, batch.mask)
    auxiliary, auxiliary_metrics = recipe.auxiliary_loss(logprobs, batch, totals)
    return loss if auxiliary is None else loss + auxiliary, {**metrics, **auxiliary_metrics}


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """Objective of the policy: the recipe's loss, to which the router's losses are added."""

    recipe: Recipe
    response_length: int

    def replayed(self, batch: Batch[Array]) -> Array | None:
        """Expert ids that each pass over `batch` replays; None without router replay."""
        return None if self.recipe.router_replay is None else required(batch.choices)

    def loss(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Array, dict[str, Any]]:
        scores = self.scores(weights, x, batch)
        loss, metrics = policy_loss(
            self.recipe, scores.logprobs, scores.entropy, batch, totals, self.response_length
        )
        if not self.sampling.recomputable or batch.behaviour_logprobs is None:
            # `prepare` has compared the full policy. Given tokens have no sampler to compare with.
            return loss, dict(metrics)
        sampled = required(batch.behaviour_logprobs)
        differences = sampling_differences(scores.behaviour_logprobs, sampled, batch.mask)
        return loss, {**metrics, **differences}

    def router_metrics(self, router: RouterStatistics[Array]) -> dict[str, Any]:
        """Means over tokens and layers."""
        metrics: dict[str, Any] = {
            "moe/load_balancing_loss": Mean(router.balance, router.tokens),
            "moe/z_loss": Mean(router.z, router.tokens),
            "moe/router_entropy": Mean(router.entropy, router.tokens),
            "moe/dropped_fraction": Mean(router.dropped, jnp.sum(router.load)),
            "moe/padded_fraction": Mean(router.padded, router.positions),
        }
        if router.agreed is not None and router.replayed is not None:
            metrics["moe/replay_agreement"] = Mean(router.agreed, router.replayed)
        if self.recipe.router_replay == "R3":
            agreement = FirstUpdate(metrics["moe/replay_agreement"])
            metrics["sampling/routing_agreement"] = agreement
        return metrics


def sampling_differences(
    logprobs: Float[Array, "batch time"],
    sampled: Float[Array, "batch time"],
    mask: Bool[Array, "batch time"],
) -> dict[str, Any]:
    """Metrics of the mismatch between trainer and sampler, in the distribution sampled from.

    Zero in exact arithmetic before the first update: the remainder is the rounding difference
    between decoding with a KV cache and one forward pass, which corrections are for.

    Args:
      logprobs: of the tokens as computed by the trainer, nats.
      sampled: the same as recorded by the sampler.
      mask: loss mask of the sampled tokens.
    """
    difference = jnp.where(mask, jnp.abs(logprobs - sampled), 0.0)
    differences = {
        "sampling/sampling_logp_difference/mean": Mean.of(difference, mask),
        "sampling/sampling_logp_difference/max": Max(jnp.max(difference)),
        "sampling/k3_kl": mismatch_statistics(logprobs, sampled, mask)["k3_kl"],
    }
    # Later mini-batches compare an updated policy: no mismatch of the sampler.
    return {name: FirstUpdate(difference) for name, difference in differences.items()}


@dataclass(frozen=True)
class CriticObjective(Objective):
    """Objective of the critic: the recipe's loss, to which the routers' losses are added."""

    recipe: Recipe
    response_length: int

    def loss(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Array, dict[str, Any]]:
        # `batch.old_values` are from before the step's first update: the centre of the value clip.
        values = self.values(weights, x, batch)
        loss, metrics = self.recipe.critic_loss(values, batch, totals, self.response_length)
        return loss, {**metrics, "critic/vf_loss": loss}


@RetryOnOverflow
def statistics_of(
    objective: PolicyObjective, policy: Transformer[Array], batch: Batch[Array]
) -> tuple[Any, Array | None]:
    """Statistics of a whole mini-batch for the recipe's surrogate, without a gradient."""
    # Over the whole mini-batch: quantiles of micro-batches do not give its quantile.
    (logprobs, entropy), overflow = logprobs_and_entropy_of.with_overflow(
        objective, policy, batch.tokens, batch.valid, objective.replayed(batch)
    )
    statistics = objective.recipe.statistics(logprobs, entropy, batch)
    return jax.lax.stop_gradient(statistics), overflow


ObjectiveT = TypeVar("ObjectiveT", PolicyObjective, CriticObjective)
UpdateMetrics = tuple[dict[str, Any], ExpertLoad[Array] | None, Array | None]
"""Metrics by name, tokens per expert, and rows beyond the expert buffers."""
Updated = tuple[Learner[Array], Outcome[Array]]
"""Learner after an optimizer step, and the outcome of the step."""


@dataclass(frozen=True)
class Network(Generic[ObjectiveT]):
    """Trained network with its objective and its optimizer.

    Attributes:
      objective: the loss, with the network's config and mesh.
      optimizer: settings of the optimizer.
      num_micro_batches: of a mini-batch, on each device.
      bins: of a micro-batch, where rows are packed.
    """

    objective: ObjectiveT
    optimizer: Optimizer
    num_micro_batches: int
    bins: int = 1

    @property
    def config(self) -> ModelConfig:
        return self.objective.config

    @property
    def mesh(self) -> FoldedMesh:
        return self.objective.mesh

    @property
    def model(self) -> Model:
        return self.objective.model

    def init(self, weights: Transformer[Array]) -> Learner[Array]:
        """Creates a learner, see `jrl.trainer.learner.learner.init_learner`."""
        return init_learner(self.optimizer, weights, self.model)

    def update(
        self,
        learner: Learner[Array],
        batch: Batch[Array],
        statistics: Any = None,
        passes: Array | None = None,
    ) -> Updated:
        """Runs one optimizer step, see `update`; on an overflow of the expert buffers it is
        recomputed with dropless ones.

        A network with adapters donates only these: its frozen weights may be shared with others.
        """

        def run(objective: ObjectiveT, learner: Learner[Array]) -> tuple[Updated, Array | None]:
            network = replace(self, objective=objective)
            args = network.update_args(learner, batch, statistics, passes)
            learner, outcome = _update(*args)
            if (frozen := args[-1]) is not None:
                learner = replace(learner, weights=combine_trees(learner.weights, frozen))
            return (learner, outcome), outcome.overflow

        def without_overflow(result: Updated) -> Updated:
            # Nothing changed: the returned learner equals the donated one, in its buffers.
            learner, first_outcome = result
            (learner, outcome), _ = run(self.objective.for_any_routing(), learner)
            return learner, replace(outcome, overflow=first_outcome.overflow)

        return run_with_fallback(lambda: run(self.objective, learner), without_overflow)[0]

    def update_args(
        self,
        learner: Learner[Any],
        batch: Batch[Any],
        statistics: Any = None,
        passes: Any = None,
    ) -> tuple[Any, ...]:
        """Arguments of the compiled `update`: of a network with adapters, the learner has only
        these, and the frozen weights are the last argument, which else is None."""
        frozen = None
        if self.config.lora is not None:
            adapters, frozen = split(learner.weights, self.config)
            learner = replace(learner, weights=adapters)
        settings = self.objective, self.optimizer, self.num_micro_batches
        return *settings, learner, batch, statistics, passes, frozen

    def with_mesh(self, mesh: FoldedMesh) -> "Network[ObjectiveT]":
        """Copy on another mesh."""
        return replace(self, objective=replace(self.objective, mesh=mesh))


def _update(*args: Any) -> Updated:
    """`update`; its first call says if the compiled program lacks the requested overlap."""
    warn_if_synchronous(update, 3, *args)
    return update(*args)


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
) -> Updated:
    """Runs one optimizer step on a mini-batch.

    If the loss or the gradient's norm is not finite, nothing changes and the step is counted as
    skipped. Nothing changes either if the loss mask of the mini-batch is empty: only momentum,
    weight decay and the routers' losses would act. Nor does anything change, and no step counts as
    skipped, if the expert buffers overflowed (`Execution.buffer_factor`):
    the caller has to update again with dropless buffers.

    Args:
      num_micro_batches: micro-batches the mini-batch is split into on each device.
      learner: donated.
      batch: the mini-batch, rows over ``dp``.
      statistics: statistics of the whole mini-batch for the loss, in addition to its counts.
      passes: ``[]`` number of micro-batches to run, the first ones; the others have no tokens.
        None runs all.
      frozen: the frozen weights of a network with adapters; `learner` has the others then
        (`moe.adapters`), before and after.

    Returns:
      The learner and the outcome, with the objective's metrics.
    """
    config, mesh = objective.config, objective.mesh
    shards, _ = split(placement.shard_specs(objective.model), config)
    # Denominators of the whole mini-batch, computed before it is split: micro-batches are summed.
    totals = count(batch, statistics)
    loss, grads, (metrics, load, overflow) = _gradients(
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
        optimizer_updates, opt_state = transformation_of(optimizer, config).update(
            grads, learner.opt_state, weights
        )
    # In float32, so that a step below the rounding error of a bfloat16 weight is not lost.
    new_weights: Any = optax.apply_updates(weights, optimizer_updates)
    # DeepSeek-V3's auxiliary-loss-free balancing: the bias is no parameter of the optimizer.
    if config.selection_bias and frozen is None:
        rate = config.bias_update_rate
        assert load is not None
        new_weights = with_updated_bias(weights, new_weights, load.counts, rate, mesh)
    updated = replace(
        learner,
        weights=new_weights,
        opt_state=opt_state,
        updates=learner.updates + 1,
        skipped_in_a_row=jnp.zeros_like(learner.skipped_in_a_row),
    )
    # After an overflow the gradient is of another routing than the routers': it is recomputed
    # (`Network.update`), and does not count as a skipped update.
    fits = jnp.ones((), bool) if overflow is None else overflow == 0
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
        weights=cast_and_gather(learner.weights, objective.model),
        masters=learner.weights if keeps_masters(config) else None,
        # Sharded as the input, so that it fits the donated buffers.
        opt_state=jax.lax.with_sharding_constraint(
            learner.opt_state, state_shardings(learner.opt_state, objective.model)
        ),
    )
    return learner, Outcome(loss, grad_norm, finite, empty, overflow, load, metrics)


def _gradients(
    objective: Objective,
    comm_dtype: str,
    num_micro_batches: int,
    weights: Transformer[Array],
    frozen: Transformer[Array] | None,
    batch: Batch[Array],
    totals: Totals[Array],
    passes: Array | None,
) -> tuple[Array, Any, UpdateMetrics]:
    """Loss of a mini-batch, its sharded gradient and its metrics, on global arrays."""
    config, mesh, replicated = objective.config, objective.mesh, PartitionSpec()
    trained_specs, frozen_specs = split(placement.stored_specs(objective.model), config)
    local = jax.shard_map(
        partial(_local_gradients, objective, comm_dtype, num_micro_batches),
        mesh=mesh.mesh,
        in_specs=(
            trained_specs,
            None if frozen is None else frozen_specs,
            PartitionSpec(mesh.dp),
            *[replicated] * 2,
        ),
        out_specs=(
            replicated,
            split(placement.shard_specs(objective.model), config)[0],
            replicated,
        ),
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
) -> tuple[Array, Transformer[Array], UpdateMetrics]:
    """Loss of a mini-batch, this device's shard of its gradient and its metrics."""
    config, mesh = objective.config, objective.mesh
    all_dims = placement.shard_dims(objective.model, comm_dtype)
    shard_dims, frozen_dims = split(all_dims, config)
    specs, _ = split(placement.specs(objective.model), config)
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
        x, router = model.run(
            weights, objective.pack(micro_batch), objective.model, layer_shard_dims
        )
        loss, metrics = objective.loss(weights, x, micro_batch, totals)
        loss = loss + router_loss(router, objective.model, totals.num_valid)
        # Ranks of cp and tp have the same loss, which counts once.
        metrics = _with_router_metrics(objective, metrics, router)
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
) -> tuple[Array, Transformer[Array], UpdateMetrics]:
    """Loss, this device's gradient, and metrics, on a pipeline."""
    mesh = objective.mesh
    loss, grads, metrics, router = stages.gradients(
        local_weights,
        vary(micro_batches, mesh.except_sequence),
        stages.Ends(
            objective.pack,
            lambda weights, x, micro_batch: objective.loss(weights, x, micro_batch, totals),
            totals.num_valid,
        ),
        objective.model,
        shard_dims,
        frozen,
    )
    router_metrics, load, overflow = _with_router_metrics(objective, {}, router)
    # Already summed over micro-batches: a stack of one.
    of_routers = jax.tree.map(lambda x: x[None], (router_metrics, load, overflow))
    stacked = ({**metrics, **of_routers[0]}, *of_routers[1:])
    # Stages have the same metrics, which count once, and each its own share of the loss.
    metric_axes = tuple(axis for axis in mesh.except_sequence if axis not in mesh.pp)
    return all_sum(loss, mesh.except_sequence), grads, _reduce_metrics(stacked, metric_axes)


def _with_router_metrics(
    objective: Objective, metrics: dict[str, Any], router: RouterStatistics[Array] | None
) -> UpdateMetrics:
    """Metrics, also of the routers, the load of the experts and their overflow, of all ranks of
    ``cp`` and ``tp``."""
    if router is None:
        return metrics, None, None
    # Metrics only; the gradient comes from `router_loss`.
    router = all_sum(jax.lax.stop_gradient(router), objective.mesh.sequence)
    metrics = {**metrics, **objective.router_metrics(router)}
    return metrics, ExpertLoad(router.load), router.overflow


def _reduce_metrics(stacked: UpdateMetrics, axes: Axes) -> UpdateMetrics:
    """Reduces metrics that are stacked over micro-batches, over them and the devices of `axes`."""
    metrics, load, overflow = stacked
    metrics = {name: reduce_metric(as_metric(metric), axes) for name, metric in metrics.items()}
    return metrics, reduce_metric(load, axes), reduce_metric(overflow, axes)
