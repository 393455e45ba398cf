"""From completions to what the updates of a step learn from."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.losses import overlong_filter
from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import Batch, Targets, given, responses_of
from jrl.recipes.base.mismatch import Corrected, Correction
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.batching import over_rows
from jrl.rollout.collection.collect import groups_of
from jrl.rollout.sampler import Completion, lengths_of, sampled_lengths_of
from jrl.rollout.timing import timed
from jrl.trainer.learner.objectives import CriticObjective, sampling_differences
from jrl.trainer.packed.scoring import packed_scores
from jrl.trainer.scoring import (
    logprobs_and_choices_of,
    logprobs_and_entropy_of,
    logprobs_of,
    values_of,
)
from jrl.trainer.setup.networks import Network, Networks
from jrl.trainer.state import TrainState, reference_of
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@partial(jax.jit, static_argnums=0)
def targets_of(recipe: Recipe, batch: Batch[Array]) -> Targets[Array]:
    """The recipe's advantages and returns over the whole batch."""
    return recipe.targets(batch)


corrected = jax.jit(Correction.correct, static_argnums=0)
"""What a step learns from, by how far the sampler is from the trainer."""


@jax.jit
def difference(logprobs: Array, old_logprobs: Array, mask: Array) -> dict[str, Array]:
    """How far the trainer is from the sampler, the whole policy on both sides."""
    differences = sampling_differences(logprobs, old_logprobs, mask)
    return {name: metric.value() for name, metric in differences.items()}


def prepare(
    networks: Networks,
    recipe: Recipe,
    state: TrainState[Array],
    completions: Sequence[Completion],
    scores: np.ndarray,
    batch: Batch[Array],
    response_length: int,
    correct: np.ndarray | None = None,
) -> tuple[Batch[Array], dict[str, float]]:
    """The batch with everything that is known before the first update.

    Advantages are those of completions as they were sampled; what is rejected after that counts in
    no loss.

    Args:
      completions: the rows of `batch`.
      scores: their verdicts.
      batch: as `collect` gives it, on the mesh of training.
      response_length: the limit of a completion, in tokens.
      correct: which of the scores are full marks; None is those of 1.

    Returns:
      The batch, and metrics: the seconds of each phase and, where the trainer scores the
      completions too, how far the sampler is from it.
    """
    seconds, rescored = dict[str, float](), None
    full = np.asarray(scores == 1.0) if correct is None else correct
    batch = verified(recipe, completions, scores, full, batch, response_length, networks.mesh)
    # Forward passes of networks as they are before the first update: none is repeated per epoch.
    if state.critic is not None:
        assert networks.critic is not None
        with timed("timing_s/values", seconds):
            values = _values(networks, networks.critic, state.critic.weights, batch)
            batch = replace(batch, old_values=jax.block_until_ready(values))
    if (reference := reference_of(networks, state)) is not None:
        with timed("timing_s/ref", seconds):
            # Another network, whose routers have their own say: nothing is replayed.
            scored = _logprobs(*reference, batch, replays=False)
            batch = replace(batch, reference_logprobs=jax.block_until_ready(scored)[0])
    if recipe.router_replay == "R3":
        _check_recorded(batch, networks.policy.config)
    # The sampler's own log-probabilities serve as old ones unless asked otherwise: a pass less.
    if recipe.rescores:
        with timed("timing_s/old_log_prob", seconds):
            batch, rescored = _rescored(networks, recipe, state, batch)
    with timed("timing_s/adv", seconds):
        batch, metrics = _with_targets(recipe, batch, rescored)
        jax.block_until_ready(batch)
        metrics = {name: float(value) for name, value in to_host(metrics).items()}
    return batch, metrics | seconds


def _values(
    networks: Networks,
    network: Network[CriticObjective],
    critic: Transformer[Array],
    batch: Batch[Array],
) -> Array:
    """Of the window's tokens, which advantages are made from, and of finished responses, which the
    critic learns from."""
    if not networks.packs:
        return values_of(network.objective, critic, batch.tokens, batch.valid)
    # A packed pass speaks of the mask alone, so the critic's tokens are put under it.
    if batch.finished is not None:
        mask = batch.mask | (responses_of(batch) & batch.finished[:, None])
        batch = replace(batch, mask=mask)
    (values,) = packed_scores(network.objective, critic, batch, network.bins)
    return values


def _logprobs(
    networks: Networks, policy: Transformer[Array], batch: Batch[Array], replays: bool
) -> tuple[Array, Array]:
    objective = networks.policy.objective
    replayed = objective.replayed(batch) if replays else None
    # A packed pass replays whatever is on record: one that must not replay runs rows as they stand.
    if networks.packs and (replays or objective.recipe.router_replay is None):
        logprobs, sampled = packed_scores(objective, policy, batch, networks.policy.bins)
        return logprobs, sampled
    return logprobs_of(objective, policy, batch.tokens, batch.valid, replayed)


def verified(
    recipe: Recipe,
    completions: Sequence[Completion],
    scores: np.ndarray,
    correct: np.ndarray,
    batch: Batch[Array],
    response_length: int,
    mesh: FoldedMesh,
) -> Batch[Array]:
    """The batch with what the verifier says: rewards, correct, groups and lengths.

    Args:
      completions: the rows of `batch`.
      scores: their verdicts.
      correct: which of the scores are full marks.
      response_length: the limit of a completion, in tokens.
      mesh: of training.
    """
    lengths = lengths_of(completions)
    before_end = sums_of_turns(completions, batch)
    # What the turns before the last were worth stays as it is: the recipe rewards the end.
    final = jnp.asarray(scores if before_end is None else scores - before_end)
    rewards = recipe.rewards(final, jnp.asarray(lengths), response_length)
    columns = {
        "rewards": rewards if before_end is None else rewards + before_end,
        "correct": correct,
        "groups": groups_of(completions),
        "lengths": sampled_lengths_of(completions),
    }
    batch = replace(batch, **to_devices(columns, over_rows(mesh)))
    return batch if batch.finished is None else _only_finished(batch, batch.finished)


def sums_of_turns(completions: Sequence[Completion], batch: Batch[Array]) -> np.ndarray | None:
    """``[completions]`` what turns before the last were worth; None where the batch knows of
    none."""
    if batch.turn_rewards is None:
        return None
    turns = [completion.trajectory.request.turns for completion in completions]
    found = [() if each is None else each.rewards_before_end for each in turns]
    return np.array([sum(reward for _, reward in of_row) for of_row in found], np.float32)


@jax.jit
def _only_finished(batch: Batch[Array], finished: Array) -> Batch[Array]:
    """Nothing has been verified of responses that go on."""
    rewards = jnp.where(finished, given(batch.rewards), 0.0)
    return replace(batch, rewards=rewards, correct=given(batch.correct) & finished)


def _check_recorded(batch: Batch[Array], config: ModelConfig) -> None:
    """The rollout must have recorded choices of experts, for the layers that have them."""
    expected = (*batch.tokens.shape, config.num_expert_layers, config.experts_per_token)
    found = None if batch.choices is None else batch.choices.shape
    if found != expected:
        raise ValueError(
            "router_replay='R3' replays the experts that the sampler chose, "
            f"{list(expected)} numbers (batch, time, layers with experts, experts per token), and "
            f"the rollout gave {'none' if found is None else list(found)}: sample with an engine "
            "that records them, or choose R2."
        )


def _rescored(
    networks: Networks, recipe: Recipe, state: TrainState[Array], batch: Batch[Array]
) -> tuple[Batch[Array], Array]:
    """The batch, under R2 with the experts that the policy chose and, where the temperature
    follows it, with the policy's entropy; and the policy's log-probabilities."""
    policy = networks.policy.objective, state.policy.weights, batch.tokens, batch.valid
    # R2 and a temperature that adapts take two passes: the second, which gives the entropy, replays
    # what the first has chosen, as every update will.
    if recipe.router_replay == "R2":
        rescored, choices = jax.block_until_ready(logprobs_and_choices_of(*policy))
        batch = replace(batch, choices=choices)
        if recipe.temperature_rule is None:
            return batch, rescored
    if recipe.temperature_rule is None:
        scored = _logprobs(networks, state.policy.weights, batch, replays=True)
        return batch, jax.block_until_ready(scored)[0]
    scored = logprobs_and_entropy_of(*policy, networks.policy.objective.replayed(batch))
    rescored, entropy = jax.block_until_ready(scored)
    return replace(batch, old_entropy=entropy), rescored


def _with_targets(
    recipe: Recipe, batch: Batch[Array], rescored: Array | None
) -> tuple[Batch[Array], dict[str, Array]]:
    """With what the recipe makes of it.

    Args:
      rescored: log-probabilities of the policy as the trainer computes them, None without.
    """
    # Both as `collect` gave them: the mask before anything is left out, and the sampler's own
    # log-probabilities, which the correction compares with even where another anchor is taken.
    sampled, as_sampled = batch.mask, given(batch.old_logprobs)
    if recipe.old_logprobs == "recompute":
        batch = replace(batch, old_logprobs=given(rescored))
    # Over the whole batch: baselines need their group, whitening needs every token.
    targets = targets_of(recipe, batch)
    # Rejection comes after credit is given, so that what is rejected is still part of baselines.
    mask = sampled if targets.mask is None else targets.mask
    critic_mask = targets.critic_mask
    if recipe.overlong_filter:
        # Fixed before the filter: the critic learns from what the length limit cut off too.
        critic_mask = mask if critic_mask is None and targets.returns is not None else critic_mask
        mask = overlong_filter(mask, given(batch.truncated))
    learned = Corrected(mask, None, {})
    if rescored is not None or recipe.correction.on:
        # Compared in the whole policy: neither what top-k and top-p cut away nor a temperature that
        # adapts is a mismatch. What weights divide by is the correction's to choose.
        learned = corrected(
            recipe.correction,
            rescored,
            as_sampled,
            mask,
            old_logprobs=given(batch.old_logprobs),
            behaviour_logprobs=given(batch.behaviour_logprobs),
        )
    if critic_mask is not None:
        # What is rejected counts for neither network.
        # Its tokens outside of `mask` (cut off, or of earlier windows) were never up for rejection,
        # so they stay.
        critic_mask = critic_mask & (learned.mask | ~mask)
    metrics = learned.metrics
    if recipe.temperature_rule is not None:
        # An update computes no log-probabilities at a temperature that adapts (`PolicyObjective`).
        metrics = metrics | difference(given(rescored), as_sampled, sampled)
    batch = replace(
        batch,
        mask=learned.mask,
        advantages=targets.advantages,
        returns=targets.returns,
        critic_mask=critic_mask,
        importance_weights=learned.importance_weights,
    )
    return batch, metrics
