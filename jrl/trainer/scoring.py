"""Scoring passes: what policy, reference and critic say of completions, on global arrays."""

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.rollout.generate import mark_replicated
from jrl.rollout.scoring import score, value
from jrl.trainer.objectives import CriticObjective, PolicyObjective
from moe import placement
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@partial(jax.jit, static_argnums=0)
def values_of(
    objective: CriticObjective, critic: Transformer[Array], tokens: Array, valid: Array
) -> Array:
    """The critic's values of all response tokens."""
    config, mesh = objective.config, objective.mesh

    def local(critic, tokens, valid):
        return mark_replicated(
            value(critic, tokens, valid, objective.layout, config, mesh)[0], mesh
        )

    return _over_rows(local, config, mesh)(critic, tokens, valid)


@partial(jax.jit, static_argnums=0)
def logprobs_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[Array, Array]:
    """A policy's log-probabilities of all response tokens: in the whole policy, and in the
    distribution that tokens are drawn from."""
    config, mesh = objective.config, objective.mesh

    def local(policy, tokens, valid):
        scores = score(policy, tokens, valid, objective.layout, config, objective.sampling, mesh)
        return mark_replicated((scores.logprobs, scores.behaviour_logprobs), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid)


@partial(jax.jit, static_argnums=0)
def logprobs_and_entropy_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[Array, Array]:
    """A policy's log-probabilities of all response tokens, and its entropy before each of them,
    both in the whole policy at the base temperature."""
    config, mesh = objective.config, objective.mesh

    def local(policy, tokens, valid):
        scores = score(policy, tokens, valid, objective.layout, config, objective.sampling, mesh)
        return mark_replicated((scores.logprobs, scores.entropy), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid)


@partial(jax.jit, static_argnums=0)
def statistics_of(
    objective: PolicyObjective, policy: Transformer[Array], batch: Batch[Array]
) -> Any:
    """What the recipe's surrogate must know of a whole mini-batch, without a gradient."""
    logprobs, entropy = logprobs_and_entropy_of(objective, policy, batch.tokens, batch.valid)
    return jax.lax.stop_gradient(objective.recipe.statistics(logprobs, entropy, batch))


def _over_rows(local: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    rows = PartitionSpec(mesh.dp)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(placement.specs(config, mesh), rows, rows),
        out_specs=rows,
    )
