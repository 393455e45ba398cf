"""What is minimised: the recipe's policy loss, its critic's loss, and the warm start's."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jrl.losses import Mean, aggregate
from jrl.recipes.actor_critic import ActorCritic
from jrl.recipes.batch import Batch, Totals
from jrl.recipes.recipe import Recipe
from jrl.rollout.sampling import Sampling
from jrl.rollout.scoring import Rows, scores_of, stream, values_of
from jrl.trainer.learner import Max
from moe.config import ModelConfig
from moe.router.statistics import RouterStatistics
from moe.tokens.packing import PackedBatch
from moe.weights import Transformer
from sharding.collectives import all_sum
from sharding.folding import FoldedMesh


@dataclass(frozen=True)
class PolicyObjective:
    """The recipe's policy loss plus the router's losses."""

    config: ModelConfig
    mesh: FoldedMesh
    rows: Rows
    recipe: Recipe
    sampling: Sampling

    def stream(self, batch: Batch[Array]) -> PackedBatch:
        return stream(batch.tokens, batch.valid, self.rows, self.config, self.mesh)

    def loss(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Array, dict[str, Any]]:
        scores = scores_of(
            weights, x, batch.tokens, self.rows, self.config, self.sampling, self.mesh
        )
        loss, metrics = self.recipe.policy_loss(scores.logprobs, scores.entropy, batch, totals)
        difference = jnp.abs(scores.sampler_logprobs - batch.sampler_logprobs)
        difference = jnp.where(batch.mask, difference, 0.0)
        return loss, {
            **metrics,
            "sampling/sampling_logp_difference/mean": Mean.of(difference, batch.mask),
            "sampling/sampling_logp_difference/max": Max(jnp.max(difference)),
        }

    def router_metrics(self, router: RouterStatistics[Array] | None) -> dict[str, Any]:
        return _router_metrics(router, self.config, self.mesh)


@dataclass(frozen=True)
class CriticObjective:
    """The recipe's loss of the critic plus the loss of the critic's routers."""

    config: ModelConfig
    mesh: FoldedMesh
    rows: Rows
    recipe: ActorCritic

    def stream(self, batch: Batch[Array]) -> PackedBatch:
        return stream(batch.tokens, batch.valid, self.rows, self.config, self.mesh)

    def loss(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Array, dict[str, Any]]:
        values = values_of(weights, x, batch.tokens, self.rows, self.config, self.mesh)
        loss, metrics = self.recipe.critic_loss(values, batch, totals)
        return loss, {**metrics, "critic/vf_loss": loss}

    def router_metrics(self, router: RouterStatistics[Array] | None) -> dict[str, Any]:
        return _router_load(router, self.mesh)


@dataclass(frozen=True)
class SupervisedObjective:
    """Negative log-likelihood of given completions, the mean over their tokens."""

    config: ModelConfig
    mesh: FoldedMesh
    rows: Rows

    def stream(self, batch: Batch[Array]) -> PackedBatch:
        return stream(batch.tokens, batch.valid, self.rows, self.config, self.mesh)

    def loss(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Array, dict[str, Any]]:
        scores = scores_of(weights, x, batch.tokens, self.rows, self.config, Sampling(), self.mesh)
        return aggregate(-scores.logprobs, batch.mask, num_tokens=totals.num_tokens), {}

    def router_metrics(self, router: RouterStatistics[Array] | None) -> dict[str, Any]:
        return _router_load(router, self.mesh)


def _router_metrics(
    router: RouterStatistics[Array] | None, config: ModelConfig, mesh: FoldedMesh
) -> dict[str, Any]:
    """Means over tokens and layers, and the load of each expert, of the tokens of all ranks
    of ``cp`` and ``tp``."""
    if router is None:
        return {}
    router = jax.lax.stop_gradient(router)
    router = all_sum(router, mesh.sequence)
    return {
        "moe/load_balancing_loss": Mean(router.balance, router.tokens),
        "moe/z_loss": Mean(router.z, router.tokens),
        "moe/router_entropy": Mean(router.entropy, router.tokens),
        "moe/dropped_fraction": Mean(router.dropped, jnp.sum(router.load)),
        "moe/padded_fraction": Mean(router.padded, router.places),
        "load": router.load,
    }


def _router_load(router: RouterStatistics[Array] | None, mesh: FoldedMesh) -> dict[str, Any]:
    """Choices of each expert, ``[layer, route]``, by the tokens of all ``cp`` and ``tp`` ranks."""
    return {} if router is None else {"load": all_sum(router.load, mesh.sequence)}
