"""Scoring passes of policy, reference model and critic over completions, on global arrays.

Each function below returns its result with the overflow of the expert buffers. As decorated, it
returns the result alone, recomputed with dropless buffers after an overflow
(`jrl.trainer.learner.overflow.RetryOnOverflow`).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.rollout.scoring import mark_replicated, score, score_values, score_with_argmax
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective
from jrl.trainer.learner.overflow import RetryOnOverflow, retry_on_overflow
from moe import placement
from moe.router.statistics import RouterStatistics, overflow_of
from moe.weights import Transformer


@retry_on_overflow()
def values_of(
    objective: CriticObjective, critic: Transformer[Array], tokens: Array, valid: Array
) -> tuple[Array, Array | None]:
    """Critic values of all response tokens."""

    def forward(critic, tokens, valid):
        return score_values(
            critic, tokens, valid, objective.layout, objective.config, objective.mesh
        )

    return _run_sharded(forward, objective, critic, tokens, valid)


@retry_on_overflow()
def logprobs_of(
    objective: PolicyObjective,
    policy: Transformer[Array],
    tokens: Array,
    valid: Array,
    choices: Array | None = None,
) -> tuple[tuple[Array, Array], Array | None]:
    """Log-probabilities of all response tokens: in the full policy, and in the distribution that
    tokens are sampled from.

    Args:
      choices: expert ids to replay; None routes normally.
    """
    names = "logprobs", "behaviour_logprobs"
    return _run_scoring(objective, policy, names, tokens, valid, choices)


@retry_on_overflow()
def logprobs_and_choices_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[tuple[Array, Array], Array | None]:
    """Log-probabilities of all response tokens in the policy, and the expert ids of its routers for
    all tokens, ``[batch, time, layer, k]`` as in `Batch.choices`."""
    names = "logprobs", "choices"
    return _run_scoring(objective, policy, names, tokens, valid, record_choices=True)


def _logprobs_and_entropy(
    objective: PolicyObjective,
    policy: Transformer[Array],
    tokens: Array,
    valid: Array,
    choices: Array | None = None,
) -> tuple[tuple[Array, Array], Array | None]:
    """Log-probabilities of all response tokens, and the policy's entropy before each of them, both
    in the full policy at the base temperature; `choices` as for `logprobs_of`."""
    return _run_scoring(objective, policy, ("logprobs", "entropy"), tokens, valid, choices)


logprobs_and_entropy_of = RetryOnOverflow(_logprobs_and_entropy)
logprobs_and_entropy_of_few = RetryOnOverflow(_logprobs_and_entropy, least_effort=True)
"""The same pass, for rare calls with a few rows."""


@retry_on_overflow()
def logprobs_and_argmax_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[tuple[Array, Array], Array | None]:
    """Log-probabilities of all response tokens in the policy, and 1 for those that are its argmax,
    0 for the others."""

    def forward(policy, tokens, valid):
        layout, config, mesh = objective.layout, objective.config, objective.mesh
        *results, router = score_with_argmax(policy, tokens, valid, layout, config, mesh)
        return tuple(results), router

    return _run_sharded(forward, objective, policy, tokens, valid)


@retry_on_overflow()
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


def _run_scoring(
    objective: PolicyObjective,
    policy: Transformer[Array],
    names: tuple[str, str],
    *inputs: Array | None,
    record_choices: bool = False,
) -> tuple[tuple[Array, Array], Array | None]:
    """Two fields of the policy's `Scores`, given tokens, their valid mask and expert ids to
    replay."""

    def forward(policy, tokens, valid, choices=None):
        scores = score(
            policy,
            tokens,
            valid,
            objective.layout,
            objective.config,
            objective.sampling,
            objective.mesh,
            choices,
            record_choices=record_choices,
        )
        return tuple(getattr(scores, name) for name in names), scores.router

    return _run_sharded(forward, objective, policy, *inputs)


def _run_sharded(
    forward: Callable[..., tuple[Any, RouterStatistics[Array] | None]],
    objective: PolicyObjective | CriticObjective,
    weights: Transformer[Array],
    *inputs: Array | None,
) -> tuple[Any, Array | None]:
    """Runs `forward` on each device, with the weights and arrays with a row per sequence. It
    returns such arrays and the router's sums; the result is the arrays and the expert buffers'
    overflow."""
    config, mesh = objective.config, objective.mesh
    rows = PartitionSpec(mesh.dp)

    def local(weights, *inputs):
        results, router = forward(weights, *inputs)
        # Ranks of cp and tp have the same values; `out_specs` needs that in their type.
        return mark_replicated(results, mesh), overflow_of(router, config)

    # Sharded weights (`Execution.fsdp`) are gathered by `in_specs`: a pass has full layers.
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(placement.specs(config, mesh), *(rows for _ in inputs)),
        out_specs=(rows, PartitionSpec()),
    )(weights, *inputs)
