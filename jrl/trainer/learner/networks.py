"""Trained networks of a run, each with its optimizer and the objective that it minimises: the loss
of the policy, of the critic, or of the warm start."""

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.checks import flag
from jrl.losses import Mean, aggregate, kl_estimate, mismatch_statistics
from jrl.processes.agreement import is_main_process
from jrl.recipes.base.batch import Batch, Totals, required
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.recipe import Metrics, Recipe
from jrl.report.warnings import FewWarnings
from jrl.rollout.collection.async_collector import AsyncBufferSpec
from jrl.rollout.decoding.slots import Decoder
from jrl.trainer.learner.learner import Learner, init_learner, split
from jrl.trainer.learner.update import Max, Objective, update
from jrl.trainer.scoring import RetryOnOverflow, logprobs_and_entropy_of
from moe.adapters import combine_trees
from moe.architecture.lora import Lora
from moe.config import ModelConfig
from moe.execution import Execution
from moe.router.statistics import RouterStatistics, run_with_fallback
from moe.weights import Transformer
from sharding.collectives import all_sum
from sharding.folding import FoldedMesh
from sharding.overlap import is_synchronous

_WARNINGS = FewWarnings()
_CHECKED: set[tuple[Any, ...]] = set()
"""Static arguments of the programs that were looked at."""


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
    # Denominators are those of the mini-batch, so this is a share, and shares are summed over
    # micro-batches and rows of `dp`.
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
        if self.sampling.adaptive is not None or batch.behaviour_logprobs is None:
            # A pass over the tokens does not compute the distribution at an adaptive temperature:
            # `prepare` has compared the full policy. Given tokens have no sampler to compare with.
            return loss, dict(metrics)
        sampled = required(batch.behaviour_logprobs)
        differences = sampling_differences(scores.behaviour_logprobs, sampled, batch.mask)
        return loss, {**metrics, **differences}

    def router_metrics(self, router: RouterStatistics[Array] | None) -> dict[str, Any]:
        """Means over tokens and layers, and the load of each expert, of the tokens of all ranks of
        ``cp`` and ``tp``."""
        if router is None:
            return {}
        # Metrics only; the gradient comes from `router_loss`.
        router = all_sum(jax.lax.stop_gradient(router), self.mesh.sequence)
        metrics = {
            "moe/load_balancing_loss": Mean(router.balance, router.tokens),
            "moe/z_loss": Mean(router.z, router.tokens),
            "moe/router_entropy": Mean(router.entropy, router.tokens),
            "moe/dropped_fraction": Mean(router.dropped, jnp.sum(router.load)),
            "moe/padded_fraction": Mean(router.padded, router.positions),
            # Counts and no mean: the selection bias is updated by those of the whole mini-batch.
            "load": router.load,
        }
        if router.agreed is not None and router.replayed is not None:
            metrics["moe/replay_agreement"] = Mean(router.agreed, router.replayed)
        if self.recipe.router_replay == "R3":
            metrics["sampling/routing_agreement"] = metrics["moe/replay_agreement"]
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
    return {
        "sampling/sampling_logp_difference/mean": Mean.of(difference, mask),
        "sampling/sampling_logp_difference/max": Max(jnp.max(difference)),
        "sampling/k3_kl": mismatch_statistics(logprobs, sampled, mask)["k3_kl"],
    }


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


@dataclass(frozen=True)
class SupervisedObjective(Objective):
    """Negative log-likelihood of given completions, the mean over their tokens, in the plain
    softmax, whatever the sampling temperature."""

    def loss(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Array, dict[str, Any]]:
        scores = self.scores(weights, x, batch)
        return aggregate(-scores.logprobs, batch.mask, num_tokens=totals.num_tokens), {}


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


ObjectiveT = TypeVar("ObjectiveT", PolicyObjective, CriticObjective, SupervisedObjective)
Updated = tuple[Learner[Array], dict[str, Any]]
"""Learner after an optimizer step, and the metrics of the step."""


def overlap_flags(execution: Execution) -> list[str]:
    """Flags of the settings that request overlap of communication with computation."""
    requested = {
        "expert_chunks": execution.expert_chunks > 1,
        "two_batch_overlap": execution.two_batch_overlap,
        "overlap_grad_reduce": execution.overlap_grad_reduce,
    }
    return [flag(name) for name, is_on in requested.items() if is_on]


def warn_if_synchronous(program: Any, num_static: int, *args: Any) -> None:
    """Prints one line if overlap is requested and all collectives of an update are synchronous.

    It compiles `program`, a jitted function, once for each set of its static arguments, the first
    `num_static`, which begin with the objective; the next call of the program runs it.
    """
    objective = args[0]
    flags, mesh = overlap_flags(objective.config.execution), objective.mesh
    if not flags or args[:num_static] in _CHECKED:
        return
    # A CPU runs its collectives one by one, and a single device has none.
    if mesh.layout.num_devices == 1 or mesh.platform in (None, "cpu"):
        return
    _CHECKED.add(args[:num_static])
    text = program.lower(*args).compile().as_text()
    if text is None or not is_synchronous(text) or not is_main_process():
        return
    _WARNINGS.warn(
        "synchronous",
        f"{', '.join(flags)}: the compiler overlaps nothing, all collectives of "
        "the update are synchronous. On a GPU its memory is too tight then: choose a smaller "
        "--micro-batch or --remat full, or leave out what overlaps.",
    )


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

    def init(self, weights: Transformer[Array]) -> Learner[Array]:
        """Creates a learner, see `jrl.trainer.learner.learner.init_learner`."""
        return init_learner(self.optimizer, weights, self.config, self.mesh)

    def update(
        self,
        learner: Learner[Array],
        batch: Batch[Array],
        statistics: Any = None,
        passes: Array | None = None,
    ) -> Updated:
        """Runs one optimizer step, see `jrl.trainer.learner.update.update`; on an overflow of the
        expert buffers it is recomputed with dropless ones.

        A network with adapters donates only these: its frozen weights may be shared with others.
        """

        def run(objective: ObjectiveT, learner: Learner[Array]) -> tuple[Updated, Array | None]:
            settings = objective, self.optimizer, self.num_micro_batches
            if objective.config.lora is None:
                learner, metrics = _update(*settings, learner, batch, statistics, passes)
                return (learner, metrics), metrics.get("overflow")
            adapters, frozen = split(learner.weights, objective.config)
            learner = replace(learner, weights=adapters)
            learner, metrics = _update(*settings, learner, batch, statistics, passes, frozen)
            learner = replace(learner, weights=combine_trees(learner.weights, frozen))
            return (learner, metrics), metrics.get("overflow")

        def without_overflow(result: Updated) -> Updated:
            # Nothing changed: the returned learner equals the donated one, in its buffers.
            learner, first_metrics = result
            (learner, metrics), _ = run(self.objective.for_any_routing(), learner)
            return learner, metrics | {"overflow": first_metrics["overflow"]}

        return run_with_fallback(lambda: run(self.objective, learner), without_overflow)[0]

    def with_mesh(self, mesh: FoldedMesh) -> "Network[ObjectiveT]":
        """Copy on another mesh."""
        return replace(self, objective=replace(self.objective, mesh=mesh))


def _update(*args: Any) -> Updated:
    """`update`; its first call says if the compiled program lacks the requested overlap."""
    warn_if_synchronous(update, 3, *args)
    return update(*args)


class PoolSpec(NamedTuple):
    """Sizes of an engine's slot pool that is a part of the state of a run.

    Attributes:
      decoder: static settings of decoding.
      slots: number of rows.
      columns: maximum tokens of a row.
    """

    decoder: Decoder
    slots: int
    columns: int


@dataclass(frozen=True)
class Networks:
    """Networks that a recipe trains.

    Attributes:
      policy: the policy network.
      critic: the value network, None without one.
      packs: true if updates run packed rows (`jrl.rollout.packing`).
      ahead_spec: sizes of the buffer of asynchronous rollouts; None without these.
      pool_spec: of an engine whose rows in flight keep their KV cache, None where that is
        recomputed.
    """

    policy: Network[PolicyObjective]
    critic: Network[CriticObjective] | None
    packs: bool = False
    ahead_spec: AsyncBufferSpec | None = None
    pool_spec: PoolSpec | None = None

    @property
    def recipe(self) -> Recipe:
        return self.policy.objective.recipe

    @property
    def mesh(self) -> FoldedMesh:
        return self.policy.mesh

    def with_adapters(self, lora: Lora | None) -> "Networks":
        """Copy whose policy has other adapters, or none."""
        objective = self.policy.objective
        objective = replace(objective, config=replace(objective.config, lora=lora))
        return replace(self, policy=replace(self.policy, objective=objective))

    def with_mesh(self, mesh: FoldedMesh) -> "Networks":
        """Copy on another mesh."""
        critic = None if self.critic is None else self.critic.with_mesh(mesh)
        return replace(self, policy=self.policy.with_mesh(mesh), critic=critic)
