"""Preparation of a step's batch: rewards, values, reference log-probabilities, advantages, mismatch
corrections, and the entropy statistics of an adaptive sampling temperature."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.losses import EntropyStatistics, Mean, overlong_filter
from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import Batch, Targets, over_rows, replicated, required, responses_of
from jrl.recipes.base.mismatch import Corrected, Correction
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.collection.collect import groups_of
from jrl.rollout.sampler import Completion, lengths_of, sampled_lengths_of, timed
from jrl.rollout.sampling import Sampling
from jrl.trainer.learner.networks import (
    CriticObjective,
    Network,
    Networks,
    PolicyObjective,
    sampling_differences,
)
from jrl.trainer.scoring import (
    logprobs_and_choices_of,
    logprobs_and_entropy_of,
    logprobs_of,
    packed_scores,
    values_of,
)
from jrl.trainer.state import TrainState, reference_of
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.sharded_jit import DeviceJit, jit_onto


@partial(DeviceJit, static_argnums=0)
def targets_of(recipe: Recipe, batch: Batch[Array]) -> Targets[Array]:
    """Recipe's advantages and returns over the whole batch."""
    return recipe.targets(batch)


correct_mismatch = DeviceJit(Correction.correct, static_argnums=0)
"""Mismatch correction of a step's batch, `Correction.correct`, compiled."""


@DeviceJit
def mismatch_metrics(logprobs: Array, old_logprobs: Array, mask: Array) -> dict[str, Array]:
    """Metrics of the mismatch between sampler and trainer, in the full policy of both."""
    differences = sampling_differences(logprobs, old_logprobs, mask)
    return {name: metric.value() for name, metric in differences.items()}


def prepare(
    networks: Networks,
    state: TrainState[Array],
    completions: Sequence[Completion],
    scores: np.ndarray,
    batch: Batch[Array],
    correct: np.ndarray | None = None,
) -> tuple[Batch[Array], dict[str, float]]:
    """Adds to the batch everything that is computed before the first update.

    Advantages are computed before rejection; rejected tokens are then removed from the loss masks.

    Args:
      completions: the rows of `batch`.
      scores: of their verdicts.
      batch: as `collect` returns it, on the mesh of training.
      correct: mask of the scores with full marks; None is those of 1.

    Returns:
      The batch, and metrics: the seconds of each phase and, where the trainer scores the
      completions too, the mismatch between sampler and trainer.
    """
    recipe, seconds, rescored = networks.recipe, dict[str, float](), None
    full = np.asarray(scores == 1.0) if correct is None else correct
    batch = add_verdicts(networks.policy.objective, completions, scores, full, batch)
    # Forward passes with the weights before the first update: none is repeated per epoch.
    if state.critic is not None:
        assert networks.critic is not None
        with timed("timing_s/values", seconds):
            values = _compute_values(networks, networks.critic, state.critic.weights, batch)
            batch = replace(batch, old_values=jax.block_until_ready(values))
    if (reference := reference_of(networks, state)) is not None:
        with timed("timing_s/ref", seconds):
            # Another network with its own routing: nothing is replayed.
            scored = _compute_logprobs(*reference, batch, replays=False)
            batch = replace(batch, reference_logprobs=jax.block_until_ready(scored)[0])
    if recipe.router_replay == "R3":
        _check_recorded_choices(batch, networks.policy.config)
    # The sampler's own log-probabilities are the old ones by default, which saves a pass.
    if recipe.rescores:
        with timed("timing_s/old_log_prob", seconds):
            batch, rescored = _rescore(networks, state.policy.weights, batch)
    with timed("timing_s/adv", seconds):
        batch, metrics = _with_targets(recipe, batch, rescored)
        jax.block_until_ready(batch)
        metrics = {name: float(value) for name, value in to_host(metrics).items()}
    return batch, metrics | seconds


def _compute_values(
    networks: Networks,
    network: Network[CriticObjective],
    critic: Transformer[Array],
    batch: Batch[Array],
) -> Array:
    """Critic values of the window's tokens, for advantages, and of finished responses, for the
    critic's loss."""
    if not networks.packs:
        return values_of(network.objective, critic, batch.tokens, batch.valid)
    # A packed pass scores only tokens in the mask, so the critic's tokens are added to it.
    if batch.finished is not None:
        mask = batch.mask | (responses_of(batch) & batch.finished[:, None])
        batch = replace(batch, mask=mask)
    (values,) = packed_scores(network.objective, critic, batch, network.bins)
    return values


def _compute_logprobs(
    networks: Networks, policy: Transformer[Array], batch: Batch[Array], replays: bool
) -> tuple[Array, Array]:
    objective = networks.policy.objective
    replayed = objective.replayed(batch) if replays else None
    # A packed pass replays all recorded expert ids: one that must not replay runs unpacked rows.
    if networks.packs and (replays or objective.recipe.router_replay is None):
        logprobs, sampled = packed_scores(objective, policy, batch, networks.policy.bins)
        return logprobs, sampled
    return logprobs_of(objective, policy, batch.tokens, batch.valid, replayed)


def add_verdicts(
    objective: PolicyObjective | CriticObjective,
    completions: Sequence[Completion],
    scores: np.ndarray,
    correct: np.ndarray,
    batch: Batch[Array],
) -> Batch[Array]:
    """Adds results of the verifier to the batch: rewards, correct, groups and lengths.

    Args:
      objective: what is trained on them.
      completions: the rows of `batch`.
      scores: of their verdicts.
      correct: mask of the scores with full marks.
    """
    lengths = lengths_of(completions)
    before_end = sum_earlier_turn_rewards(completions, batch)
    # Rewards of turns before the last are not transformed: the recipe's `rewards` applies to the
    # end.
    final = jnp.asarray(scores if before_end is None else scores - before_end)
    rewards = objective.recipe.rewards(final, jnp.asarray(lengths), objective.response_length)
    verdicts = {
        "rewards": rewards if before_end is None else rewards + before_end,
        "correct": correct,
        "groups": groups_of(completions),
        "lengths": sampled_lengths_of(completions),
    }
    batch = replace(batch, **to_devices(verdicts, over_rows(objective.mesh)))
    return batch if batch.finished is None else _clear_unfinished(batch, batch.finished)


def sum_earlier_turn_rewards(
    completions: Sequence[Completion], batch: Batch[Array]
) -> np.ndarray | None:
    """Sum of the rewards of turns before the last, ``[completions]``; None where the batch has
    none."""
    if batch.turn_rewards is None:
        return None
    conversations = [completion.trajectory.request.conversation for completion in completions]
    earlier_rewards = [
        () if conversation is None else conversation.rewards_before_end
        for conversation in conversations
    ]
    return np.array(
        [sum(reward for _, reward in row_rewards) for row_rewards in earlier_rewards], np.float32
    )


@jax.jit
def _clear_unfinished(batch: Batch[Array], finished: Array) -> Batch[Array]:
    """Sets the rewards of unfinished responses to 0, as they were not verified."""
    rewards = jnp.where(finished, required(batch.rewards), 0.0)
    return replace(batch, rewards=rewards, correct=required(batch.correct) & finished)


def _check_recorded_choices(batch: Batch[Array], config: ModelConfig) -> None:
    """Checks that the rollout recorded expert ids for all layers with experts."""
    expected = (*batch.tokens.shape, config.num_expert_layers, config.experts_per_token)
    recorded = None if batch.choices is None else batch.choices.shape
    if recorded != expected:
        raise ValueError(
            "router_replay='R3' replays the experts that the sampler chose, "
            f"{list(expected)} numbers (batch, time, layers with experts, experts per token), and "
            f"the rollout gave {'none' if recorded is None else list(recorded)}: sample with an "
            "engine that records them, or choose R2."
        )


def _rescore(
    networks: Networks, policy: Transformer[Array], batch: Batch[Array]
) -> tuple[Batch[Array], Array]:
    """Scores the batch with the policy; returns the batch and the policy's log-probabilities. The
    batch gets the policy's expert ids under R2, and its entropy for an adaptive temperature."""
    objective, recipe = networks.policy.objective, networks.recipe
    # R2 with an adaptive temperature takes two passes: the second, for the entropy, replays the
    # expert ids of the first, as every update does.
    if recipe.router_replay == "R2":
        rescored, choices = jax.block_until_ready(
            logprobs_and_choices_of(objective, policy, batch.tokens, batch.valid)
        )
        batch = replace(batch, choices=choices)
        if recipe.temperature_rule is None:
            return batch, rescored
    if recipe.temperature_rule is None:
        scored = _compute_logprobs(networks, policy, batch, replays=True)
        return batch, jax.block_until_ready(scored)[0]
    scored = logprobs_and_entropy_of(
        objective, policy, batch.tokens, batch.valid, objective.replayed(batch)
    )
    rescored, entropy = jax.block_until_ready(scored)
    return replace(batch, old_entropy=entropy), rescored


def _with_targets(
    recipe: Recipe, batch: Batch[Array], rescored: Array | None
) -> tuple[Batch[Array], dict[str, Array]]:
    """Adds the recipe's targets and the mismatch correction; returns the batch and metrics.

    Args:
      rescored: log-probabilities of the policy as recomputed by the trainer, None without.
    """
    # Both as returned by `collect`: the mask before tokens are removed, and the sampler's own
    # log-probabilities, which the correction compares with even if the old ones are recomputed.
    sampled_mask, sampler_logprobs = batch.mask, required(batch.old_logprobs)
    if recipe.old_logprobs == "recompute":
        batch = replace(batch, old_logprobs=required(rescored))
    # Over the whole batch: baselines need their group, whitening needs every token.
    targets = targets_of(recipe, batch)
    # Rejection comes after the advantages, so that rejected samples are still part of baselines.
    mask = sampled_mask if targets.mask is None else targets.mask
    critic_mask = targets.critic_mask
    if recipe.overlong_filter:
        # Set before the filter: the critic is trained on truncated completions too.
        critic_mask = mask if critic_mask is None and targets.returns is not None else critic_mask
        mask = overlong_filter(mask, required(batch.truncated))
    correction = Corrected(mask, None, {})
    if rescored is not None or recipe.correction.on:
        # Compared in the full policy: neither top-k and top-p nor an adaptive temperature is a
        # mismatch. The correction chooses the denominator of the weights.
        correction = correct_mismatch(
            recipe.correction,
            rescored,
            sampler_logprobs,
            mask,
            old_logprobs=required(batch.old_logprobs),
            behaviour_logprobs=required(batch.behaviour_logprobs),
        )
    if critic_mask is not None:
        # Rejected tokens are removed for both networks.
        # Tokens outside of `mask` (truncated, or of earlier windows) were not candidates for
        # rejection, so they stay in the critic's mask.
        critic_mask = critic_mask & (correction.mask | ~mask)
    metrics = correction.metrics
    if recipe.temperature_rule is not None:
        # Updates compute no log-probabilities at an adaptive temperature (`PolicyObjective`).
        metrics = metrics | mismatch_metrics(required(rescored), sampler_logprobs, sampled_mask)
    batch = replace(
        batch,
        mask=correction.mask,
        advantages=targets.advantages,
        returns=targets.returns,
        critic_mask=critic_mask,
        importance_weights=correction.importance_weights,
    )
    return batch, metrics


def statistics_of_step(
    networks: Networks,
    batch: Batch[Array],
    sampled: Array,
    before: EntropyStatistics[Array] | None,
) -> EntropyStatistics[Array] | None:
    """Recipe's entropy statistics of a step, replicated on every device; those of the step `before`
    where no token is in the mask.

    Args:
      batch: as `prepare` gives it.
      sampled: ``[batch, time]`` the mask before anything was rejected.
    """
    if before is None:
        return None
    return _statistics(networks.recipe, replicated(networks.mesh))(
        replace(batch, mask=sampled), before
    )


@cache
def _statistics(recipe: Recipe, sharding: NamedSharding) -> Callable[..., Any]:
    def latest(batch: Batch[Array], before: EntropyStatistics[Array]) -> Any:
        # Without tokens there are no statistics, but the sampler needs some.
        any_token = jnp.any(batch.mask)
        return jax.tree.map(
            lambda new, old: jnp.where(any_token, new, old),
            recipe.entropy_statistics(batch),
            before,
        )

    return jit_onto(latest, sharding)


@partial(DeviceJit, static_argnums=0)
def temperatures(
    sampling: Sampling, batch: Batch[Array], sampled: Array, before: EntropyStatistics[Array]
) -> dict[str, Array]:
    """Metrics of the temperatures at which the tokens were sampled, from the trainer's entropies.

    Args:
      batch: as `prepare` gives it.
      sampled: ``[batch, time]`` the mask before anything was rejected.
      before: the statistics of the step before this one.
    """
    assert sampling.adaptive is not None
    entropy, base = required(batch.old_entropy), sampling.temperature
    # The sampler's rule applied to the trainer's entropies: no temperatures need be recorded.
    token_temperatures = sampling.adaptive.token_temperatures(entropy, sampled, before, base)
    fallback = jnp.asarray(base, token_temperatures.dtype)  # reported where no token is in the mask
    low = jnp.min(jnp.where(sampled, token_temperatures, jnp.inf))
    high = jnp.max(jnp.where(sampled, token_temperatures, -jnp.inf))
    any_token = jnp.any(sampled)
    spread = {"mean": Mean.of(token_temperatures, sampled).value(), "min": low, "max": high}
    return {
        f"sampling/temperature/{n}": jnp.where(any_token, x, fallback) for n, x in spread.items()
    }
