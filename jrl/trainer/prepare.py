"""From completions to what the updates of a step learn from."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import Batch, Targets, given, responses_of
from jrl.recipes.base.mismatch import Corrected, Correction
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.batching import over_rows
from jrl.rollout.collect import groups_of
from jrl.rollout.sampler import Completion, lengths_of
from jrl.trainer.objectives import CriticObjective
from jrl.trainer.scoring import logprobs_of, packed_logprobs, packed_values, values_of
from jrl.trainer.setup.networks import Network, Networks
from jrl.trainer.state import TrainState
from moe.weights import Transformer


@partial(jax.jit, static_argnums=0)
def targets_of(recipe: Recipe, batch: Batch[Array]) -> Targets[Array]:
    """The recipe's advantages and returns over the whole batch."""
    return recipe.targets(batch)


@partial(jax.jit, static_argnums=0)
def corrected(
    correction: Correction, logprobs: Array, behaviour_logprobs: Array, mask: Array
) -> Corrected:
    """What a step learns from, by how far the sampler is from the trainer."""
    return correction.correct(logprobs, behaviour_logprobs, mask)


def prepare(
    networks: Networks,
    recipe: Recipe,
    state: TrainState[Array],
    completions: Sequence[Completion],
    scores: np.ndarray,
    batch: Batch[Array],
    response_length: int,
) -> tuple[Batch[Array], dict[str, float]]:
    """The batch with everything that is known before the first update.

    Advantages are those of completions as they were sampled; what is rejected after that counts in
    no loss.

    Args:
      completions: the rows of `batch`.
      scores: their verdicts, in [0, 1].
      batch: as `collect` gives it, on the mesh of training.
      response_length: the limit of a completion, in tokens.

    Returns:
      The batch, and metrics: the seconds of each phase and, where the trainer scores the
      completions too, how far the sampler is from it.
    """
    seconds, rescored = dict[str, float](), None
    batch = _verified(recipe, completions, scores, batch, response_length, networks)
    # Forward passes of networks as they are before the first update: none is repeated per epoch.
    if state.critic is not None:
        assert networks.critic is not None
        with _timed("timing_s/values", seconds):
            values = _values(networks, networks.critic, state.critic.weights, batch)
            batch = replace(batch, old_values=jax.block_until_ready(values))
    if state.reference is not None:
        with _timed("timing_s/ref", seconds):
            scored = _logprobs(networks, state.reference, batch)
            batch = replace(batch, reference_logprobs=jax.block_until_ready(scored)[0])
    # The sampler's own log-probabilities serve as old ones unless asked otherwise: a pass less.
    if recipe.rescores:
        with _timed("timing_s/old_log_prob", seconds):
            scored = _logprobs(networks, state.policy.weights, batch)
            rescored = jax.block_until_ready(scored)[0]
    with _timed("timing_s/adv", seconds):
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
    if batch.finished is not None:
        mask = batch.mask | (responses_of(batch) & batch.finished[:, None])
        batch = replace(batch, mask=mask)
    return packed_values(network.objective, critic, batch, network.bins)


def _logprobs(
    networks: Networks, policy: Transformer[Array], batch: Batch[Array]
) -> tuple[Array, Array]:
    objective = networks.policy.objective
    if not networks.packs:
        return logprobs_of(objective, policy, batch.tokens, batch.valid)
    return packed_logprobs(objective, policy, batch, networks.policy.bins)


def _verified(
    recipe: Recipe,
    completions: Sequence[Completion],
    scores: np.ndarray,
    batch: Batch[Array],
    response_length: int,
    networks: Networks,
) -> Batch[Array]:
    """With what the verifier says."""
    lengths = lengths_of(completions)
    rewards = recipe.rewards(jnp.asarray(scores), jnp.asarray(lengths), response_length)
    columns = {
        "rewards": rewards,
        "correct": scores == 1.0,
        "groups": groups_of(completions),
        "lengths": lengths,
    }
    batch = replace(batch, **to_devices(columns, over_rows(networks.mesh)))
    return batch if batch.finished is None else _only_finished(batch, batch.finished)


@jax.jit
def _only_finished(batch: Batch[Array], finished: Array) -> Batch[Array]:
    """Nothing has been verified of responses that go on."""
    rewards = jnp.where(finished, given(batch.rewards), 0.0)
    return replace(batch, rewards=rewards, correct=given(batch.correct) & finished)


def _with_targets(
    recipe: Recipe, batch: Batch[Array], rescored: Array | None
) -> tuple[Batch[Array], dict[str, Array]]:
    """With what the recipe makes of it.

    Args:
      rescored: log-probabilities of the policy as the trainer computes them, None without.
    """
    sampled, as_sampled = batch.mask, given(batch.old_logprobs)
    if recipe.old_logprobs == "recompute":
        batch = replace(batch, old_logprobs=given(rescored))
    # Over the whole batch: baselines need their group, whitening needs every token.
    targets = targets_of(recipe, batch)
    # Rejection comes after credit is given, so that what is rejected is still part of baselines.
    mask = sampled if targets.mask is None else targets.mask
    learned = Corrected(mask, None, {})
    if rescored is not None:
        # In the whole policy: that top-k and top-p cut tokens away is no mismatch.
        learned = corrected(recipe.correction, rescored, as_sampled, mask)
    critic_mask = targets.critic_mask
    if critic_mask is not None:
        # What is rejected counts for neither network.
        critic_mask = critic_mask & (learned.mask | ~mask)
    batch = replace(
        batch,
        mask=learned.mask,
        advantages=targets.advantages,
        returns=targets.returns,
        critic_mask=critic_mask,
        importance_weights=learned.importance_weights,
    )
    return batch, learned.metrics


@contextmanager
def _timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the time of its body, which waits for what it dispatches."""
    begin = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin
