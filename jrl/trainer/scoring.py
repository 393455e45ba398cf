"""Scoring passes: what policy, reference and critic say of completions, on global arrays."""

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.rollout.scoring import Scores, mark_replicated, score, value
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
    objective: PolicyObjective,
    policy: Transformer[Array],
    tokens: Array,
    valid: Array,
    choices: Array | None = None,
) -> tuple[Array, Array]:
    """A policy's log-probabilities of all response tokens: in the whole policy, and in the
    distribution that tokens are drawn from.

    Args:
      choices: experts that its routers send the tokens to again; None lets them choose.
    """
    config, mesh = objective.config, objective.mesh

    def local(policy, *given):
        scores = _score(objective, policy, *given)
        return mark_replicated((scores.logprobs, scores.behaviour_logprobs), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid, choices)


@partial(jax.jit, static_argnums=0)
def logprobs_and_choices_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[Array, Array]:
    """A policy's log-probabilities of all response tokens, and the experts that its routers chose
    for them, ``[batch, time, layer, k]`` as in `Batch.choices`."""
    config, mesh = objective.config, objective.mesh

    def local(policy, tokens, valid):
        scores = _score(objective, policy, tokens, valid, record_choices=True)
        return mark_replicated((scores.logprobs, scores.choices), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid)


@partial(jax.jit, static_argnums=0)
def logprobs_and_entropy_of(
    objective: PolicyObjective,
    policy: Transformer[Array],
    tokens: Array,
    valid: Array,
    choices: Array | None = None,
) -> tuple[Array, Array]:
    """A policy's log-probabilities of all response tokens, and its entropy before each of them,
    both in the whole policy at the base temperature.

    Args:
      choices: as for `logprobs_of`.
    """
    config, mesh = objective.config, objective.mesh

    def local(policy, *given):
        scores = _score(objective, policy, *given)
        return mark_replicated((scores.logprobs, scores.entropy), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid, choices)


@partial(jax.jit, static_argnums=0)
def statistics_of(
    objective: PolicyObjective, policy: Transformer[Array], batch: Batch[Array]
) -> Any:
    """What the recipe's surrogate must know of a whole mini-batch, without a gradient."""
    given = batch.tokens, batch.valid, objective.replayed(batch)
    logprobs, entropy = logprobs_and_entropy_of(objective, policy, *given)
    return jax.lax.stop_gradient(objective.recipe.statistics(logprobs, entropy, batch))


def _score(
    objective: PolicyObjective,
    policy: Transformer[Array],
    tokens: Array,
    valid: Array,
    choices: Array | None = None,
    *,
    record_choices: bool = False,
) -> Scores:
    fixed = objective.layout, objective.config, objective.sampling, objective.mesh
    return score(policy, tokens, valid, *fixed, choices, record_choices=record_choices)


def _over_rows(local: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    """`local`, of the policy and arrays with a row per sequence, on global arrays."""
    rows = PartitionSpec(mesh.dp)

    def everywhere(policy: Transformer[Array], *given: Array | None) -> Any:
        return jax.shard_map(
            local,
            mesh=mesh.mesh,
            in_specs=(placement.specs(config, mesh), *(rows for _ in given)),
            out_specs=rows,
        )(policy, *given)

    return everywhere
