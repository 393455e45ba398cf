"""Objectives that are minimised: the loss of the policy, of the critic, and of the warm start."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses import Mean, aggregate, kl_estimate, mismatch_statistics
from jrl.recipes.base.batch import Batch, Totals, required
from jrl.recipes.base.recipe import Metrics, Recipe
from jrl.trainer.compiled import RetryOnOverflow
from jrl.trainer.learner.update import Max, Objective
from jrl.trainer.scoring import logprobs_and_entropy_of
from moe.router.statistics import RouterStatistics
from moe.weights import Transformer
from sharding.collectives import all_sum
from sharding.folding import FoldedMesh


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
        metrics = _router_metrics(router, self.mesh)
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


def _router_metrics(router: RouterStatistics[Array] | None, mesh: FoldedMesh) -> dict[str, Any]:
    """Means over tokens and layers, and the load of each expert, of the tokens of all ranks
    of ``cp`` and ``tp``."""
    if router is None:
        return {}
    # Metrics only; the gradient comes from `router_loss`.
    router = jax.lax.stop_gradient(router)
    router = all_sum(router, mesh.sequence)
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
    return metrics
