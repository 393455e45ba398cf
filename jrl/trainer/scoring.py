"""Scoring passes: what policy, reference and critic say of completions, on global arrays.

Each gives what it found beside what it had no room for; called, the first with room for everything
(`jrl.trainer.learner.overflow.Exact`).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.recipes.base.batch import Batch
from jrl.rollout.scoring import mark_replicated, ranked, score, value
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective
from jrl.trainer.learner.overflow import Exact, exact
from moe import placement
from moe.router.overflow import overflow_of
from moe.router.statistics import RouterStatistics
from moe.weights import Transformer


@exact()
def values_of(
    objective: CriticObjective, critic: Transformer[Array], tokens: Array, valid: Array
) -> tuple[Array, Array | None]:
    """The critic's values of all response tokens."""

    def read(critic, tokens, valid):
        return value(critic, tokens, valid, objective.layout, objective.config, objective.mesh)

    return _everywhere(read, objective, critic, tokens, valid)


@exact()
def logprobs_of(
    objective: PolicyObjective,
    policy: Transformer[Array],
    tokens: Array,
    valid: Array,
    choices: Array | None = None,
) -> tuple[tuple[Array, Array], Array | None]:
    """A policy's log-probabilities of all response tokens: in the whole policy, and in the
    distribution that tokens are drawn from.

    Args:
      choices: experts that its routers send the tokens to again; None lets them choose.
    """
    names = "logprobs", "behaviour_logprobs"
    return _scores(objective, policy, names, tokens, valid, choices)


@exact()
def logprobs_and_choices_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[tuple[Array, Array], Array | None]:
    """A policy's log-probabilities of all response tokens, and the experts that its routers chose
    for them, ``[batch, time, layer, k]`` as in `Batch.choices`."""
    names = "logprobs", "choices"
    return _scores(objective, policy, names, tokens, valid, record_choices=True)


def _logprobs_and_entropy(
    objective: PolicyObjective,
    policy: Transformer[Array],
    tokens: Array,
    valid: Array,
    choices: Array | None = None,
) -> tuple[tuple[Array, Array], Array | None]:
    """A policy's log-probabilities of all response tokens, and its entropy before each of them,
    both in the whole policy at the base temperature; `choices` as for `logprobs_of`."""
    return _scores(objective, policy, ("logprobs", "entropy"), tokens, valid, choices)


logprobs_and_entropy_of = Exact(_logprobs_and_entropy)
logprobs_and_entropy_of_few = Exact(_logprobs_and_entropy, least_effort=True)
"""The same of a few rows, now and then."""


@exact()
def ranks_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[tuple[Array, Array], Array | None]:
    """A policy's log-probabilities of all response tokens, and 1 for those that are its likeliest
    and 0 for the others."""

    fixed = objective.layout, objective.config, objective.mesh

    def read(policy, tokens, valid):
        *found, router = ranked(policy, tokens, valid, *fixed)
        return tuple(found), router

    return _everywhere(read, objective, policy, tokens, valid)


@exact()
def statistics_of(
    objective: PolicyObjective, policy: Transformer[Array], batch: Batch[Array]
) -> tuple[Any, Array | None]:
    """What the recipe's surrogate must know of a whole mini-batch, without a gradient."""
    given = batch.tokens, batch.valid, objective.replayed(batch)
    # Over the whole mini-batch at once: a quantile of its pieces is not its quantile.
    (logprobs, entropy), overflow = logprobs_and_entropy_of.counted(objective, policy, *given)
    statistics = objective.recipe.statistics(logprobs, entropy, batch)
    return jax.lax.stop_gradient(statistics), overflow


def _scores(
    objective: PolicyObjective,
    policy: Transformer[Array],
    names: tuple[str, str],
    *given: Array | None,
    record_choices: bool = False,
) -> tuple[tuple[Array, Array], Array | None]:
    """Two of the policy's `Scores` of tokens, which of them are valid, and choices to replay."""
    fixed = objective.layout, objective.config, objective.sampling, objective.mesh

    def read(policy, tokens, valid, choices=None):
        found = score(policy, tokens, valid, *fixed, choices, record_choices=record_choices)
        return tuple(getattr(found, name) for name in names), found.router

    return _everywhere(read, objective, policy, *given)


def _everywhere(
    read: Callable[..., tuple[Any, RouterStatistics[Array] | None]],
    objective: PolicyObjective | CriticObjective,
    weights: Transformer[Array],
    *given: Array | None,
) -> tuple[Any, Array | None]:
    """What `read` finds on each device, and the router's sums, of the weights and of arrays with a
    row per sequence: such arrays, and what there was no room for."""
    config, mesh = objective.config, objective.mesh
    rows = PartitionSpec(mesh.dp)

    def local(weights, *given):
        found, router = read(weights, *given)
        # Ranks of cp and tp hold the same values; `out_specs` wants that said in their type.
        return mark_replicated(found, mesh), overflow_of(router, config)

    # Weights that lie in parts (`Execution.fsdp`) are gathered on their way in: a pass has whole
    # layers.
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(placement.specs(config, mesh), *(rows for _ in given)),
        out_specs=(rows, PartitionSpec()),
    )(weights, *given)
