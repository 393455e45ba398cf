"""Training step: collects completions, prepares their batch (rewards, log-probabilities, values,
advantages, loss masks) and runs the optimizer steps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.losses import overlong_filter
from jrl.processes.agreement import to_devices, to_host
from jrl.processes.allocator import return_free_memory
from jrl.processes.progress import heartbeat, phase
from jrl.recipes.base.batch import (
    CRITIC,
    Batch,
    Targets,
    over_rows,
    replicated,
    required,
    responses_of,
    take_rows,
)
from jrl.recipes.base.mismatch import Corrected, Correction
from jrl.recipes.base.recipe import POLICY, Recipe
from jrl.recipes.base.teacher import UNSCORED, add_teacher, check_teacher
from jrl.rollout.collection.collect import Collected, add_verdicts, collect
from jrl.rollout.packing import MAX_ROWS_PER_BIN, clear_idle_rows, counts_of, pack_rows, plan
from jrl.rollout.sampler import Completion, Sampler, correct_of, scores_of, timed
from jrl.trainer.async_step import AsyncStep
from jrl.trainer.learner.learner import Learner
from jrl.trainer.learner.metrics import Outcome
from jrl.trainer.learner.networks import Frozen, Networks
from jrl.trainer.learner.teacher import DivergenceScorer
from jrl.trainer.learner.update import (
    CriticObjective,
    Network,
    PolicyObjective,
    sampling_differences,
    statistics_of,
)
from jrl.trainer.scoring import (
    logprobs_and_choices_of,
    logprobs_and_entropy_of,
    logprobs_of,
    outputs_of,
    packed_scores,
    values_of,
)
from jrl.trainer.state import Randomness, TrainState, frozen_weights
from jrl.trainer.summary import count_updates, describe, summarise
from jrl.trainer.token_records import TokenLogConfig, TokenRecord, token_records
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.sharded_jit import DeviceJit, jit_onto

ROLES = {"critic": CRITIC, "actor": POLICY}
"""Roles of trained networks by their name in metrics, in the order of their updates; neither update
uses the other's new weights in this step."""
SAMPLES_TIMING = "timing_s/samples"
"""Seconds spent on samples for people, which are no part of the step."""


@dataclass(frozen=True)
class NonFinite:
    """Update that was skipped because loss or gradient was not finite, with its mini-batch."""

    network: str
    batch: Batch[Array]
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class StepResult:
    """Result of a training step of any stage.

    Attributes:
      metrics: metrics of the step.
      nonfinite: updates that were skipped.
    """

    metrics: dict[str, float]
    nonfinite: list[NonFinite]


@dataclass(frozen=True)
class RolloutStepResult(StepResult):
    """Result of a training step on sampled completions.

    Attributes:
      collected: the training batch.
      tokens: records of the tokens of some completions, by row; empty if none are requested.
    """

    collected: Collected
    tokens: dict[int, TokenRecord]


def train_step(
    sampler: Sampler,
    networks: Networks,
    state: TrainState[Array],
    randomness: Randomness,
    *,
    shuffle_rewards: bool = False,
    token_log: TokenLogConfig | None = None,
) -> tuple[TrainState[Array], RolloutStepResult]:
    """Runs one training step: samples, scores and updates. With asynchronous rollouts
    (`Networks.ahead_spec`), the step trains on a batch that was sampled before, and samples for
    later steps.

    Args:
      shuffle_rewards: true to permute the scores among the completions, a control experiment.
      token_log: number of token records to make; None makes none.
    """

    def train_on(collected: Collected) -> tuple[TrainState[Array], RolloutStepResult]:
        return _train_on_collected(
            networks, state, collected, randomness, shuffle_rewards, token_log
        )

    if networks.ahead_spec is not None:
        async_step = AsyncStep(sampler, networks, state)
        # Meanwhile the sampler uses the weights from the start of this step.
        with async_step.sampling() as wait_for_sampler:
            new_state, result = train_on(async_step.collected())
            async_result = wait_for_sampler()
        result = replace(result, metrics=result.metrics | async_result.seconds)
        new_state = replace(new_state, ahead=async_result.buffer, pool=async_result.pool)
        return new_state, result
    with phase("rollout"):
        # Collect: the policy is frozen while it samples, so all completions of a step are
        # on-policy.
        sampled_by = networks.recipe.sampler_state(state.algorithm)
        sampler.engine.load(state.policy.weights, int(state.step), sampled_by)
        # A task returns the same example for an id: the number of prompts used is all its state.
        collected = collect(
            sampler,
            networks.recipe,
            networks.mesh,
            int(state.prompts_seen),
            to_host(state.algorithm),
        )
        # A rollout with another layout has a copy of the weights, which is freed for the updates.
        sampler.engine.release()
        return_free_memory()
    return train_on(collected)


def _train_on_collected(
    networks: Networks,
    state: TrainState[Array],
    collected: Collected,
    randomness: Randomness,
    shuffle_rewards: bool,
    token_log: TokenLogConfig | None,
) -> tuple[TrainState[Array], RolloutStepResult]:
    """Runs the rest of a step after its completions were collected."""
    recipe, completions = networks.recipe, collected.completions
    scores, correct = scores_of(completions), correct_of(completions)
    if shuffle_rewards:
        # With an epoch number that no shuffle of rows has, so that no RNG key is used twice.
        order = randomness.shuffler(int(state.step), -1 % 2**32).permutation(len(scores))
        scores, correct = scores[order], correct[order]
        # Rewards of turns are dropped: they would not match the permuted scores.
        collected = replace(collected, batch=replace(collected.batch, turn_rewards=None))
    with phase("scoring"):
        batch, prepare_metrics = prepare(
            networks, state, completions, scores, collected.batch, correct
        )
    sampled, everywhere = collected.batch.mask, replicated(networks.mesh)
    # On the devices like all of the state: a checkpoint is one pytree with one layout.
    algorithm = {**state.algorithm, **to_devices(dict(collected.state), everywhere)}
    if algorithm:
        # Over all sampled tokens: `prepare` may have removed tokens from the mask of `batch`.
        update_state = _state_update(recipe, everywhere)
        algorithm, state_metrics = update_state(algorithm, replace(batch, mask=sampled))
        prepare_metrics |= {name: float(value) for name, value in to_host(state_metrics).items()}
    tokens = dict[int, TokenRecord]()
    if token_log is not None:
        # Scored before the updates, which donate the buffers of these weights.
        policy = state.policy.weights
        with timed(SAMPLES_TIMING, prepare_metrics):
            tokens = token_records(networks, policy, completions, collected.batch, batch, token_log)
    with phase("update"):
        state, history, nonfinite, seconds = train_on_batch(networks, state, batch, randomness)
    state = replace(
        state,
        algorithm=algorithm,
        step=state.step + 1,
        prompts_seen=to_devices(np.asarray(collected.prompts_seen, np.int32), everywhere),
    )
    metrics = {
        **collected.metrics,
        **describe(completions, batch, sampled, recipe.group_size),
        **summarise(history),
        **count_updates(history),
        **collected.seconds,
        **prepare_metrics,
        **seconds,
    }
    # The sampler is compared with the trainer in the first update of the policy; if there is none,
    # here. `state.step` counts this step by now, which `train_on_batch` did not see counted.
    if int(state.step) <= recipe.value_pretraining_steps:
        metrics |= sampling_difference(networks, state, batch)
    else:
        # `updates` counts the steps taken, of which the first is number 0 to the schedule.
        metrics["actor/lr"] = networks.policy.optimizer.rate_at(int(state.policy.updates) - 1)
    if networks.critic is not None:
        updates = int(state.networks[CRITIC].updates)
        metrics["critic/lr"] = networks.critic.optimizer.rate_at(updates - 1)
    return state, RolloutStepResult(metrics, nonfinite, collected, tokens)


@cache
def _state_update(recipe: Recipe, sharding: NamedSharding) -> Callable[..., Any]:
    """Compiled `Recipe.update_state`."""
    return jit_onto(recipe.update_state, sharding)


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
      scores: scores of their verdicts.
      batch: as `collect` returns it, on the mesh of training.
      correct: mask of the scores with full marks; None selects scores of 1.

    Returns:
      The batch, and metrics: the seconds of each phase and, if the trainer scores the
      completions too, the mismatch between sampler and trainer.
    """
    recipe, seconds, rescored = networks.recipe, dict[str, float](), None
    full = np.asarray(scores == 1.0) if correct is None else correct
    length = networks.policy.objective.response_length
    batch = add_verdicts(batch, completions, scores, full, recipe, length, networks.mesh)
    # Forward passes with the weights before the first update: none is repeated per epoch.
    if networks.critic is not None:
        with timed("timing_s/values", seconds):
            critic = state.networks[CRITIC].weights
            values = _compute_values(networks, networks.critic, critic, batch)
            batch = replace(batch, old_values=jax.block_until_ready(values))
    for role, network in networks.frozen.items():
        with timed("timing_s/ref", seconds):
            weights = frozen_weights(networks, state, role)
            if isinstance(network.scorer, DivergenceScorer):
                weights = weights, state.policy.weights
            outputs = jax.block_until_ready(_score_frozen(networks, network, weights, batch))
            for name, output in zip(network.scorer.fields, outputs, strict=False):
                batch = replace(batch, **{name: {**getattr(batch, name), role: output}})
    if recipe.router_replay == "R3":
        _check_recorded_choices(batch, networks.policy.config)
    # The sampler's own log-probabilities are the old ones by default, which saves a pass.
    if recipe.rescores:
        with timed("timing_s/old_log_prob", seconds):
            batch, rescored = _rescore(networks, state.policy.weights, batch)
    with timed("timing_s/adv", seconds):
        batch, metrics = with_targets(recipe, batch, rescored)
        jax.block_until_ready(batch)
        metrics = {name: float(value) for name, value in to_host(metrics).items()}
    check_teacher(recipe, metrics.get(UNSCORED, 0.0))
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


def _score_frozen(
    networks: Networks, network: Frozen, weights: Any, batch: Batch[Array]
) -> Sequence[Array]:
    """Outputs of the scorer of a frozen network, which may have a mesh of its own, for the sampled
    tokens."""
    scorer = network.scorer
    # Nothing is replayed: it is another network with its own routing.
    rows = Batch(batch.tokens, batch.valid, batch.mask)
    has_other_mesh = scorer.mesh != networks.mesh
    if has_other_mesh:
        rows = jax.device_put(rows, over_rows(scorer.mesh))
    if networks.packs and scorer.mesh.layout.pp == 1 and networks.recipe.router_replay is None:
        outputs = packed_scores(scorer, weights, rows, network.bins)
    else:
        outputs = outputs_of(scorer, weights, rows.tokens, rows.valid)
    return jax.device_put(outputs, over_rows(networks.mesh)) if has_other_mesh else outputs


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
    batch gets the policy's expert ids under R2, and its entropy if the recipe uses it."""
    objective, recipe = networks.policy.objective, networks.recipe
    # R2 with entropies takes two passes: the second, for the entropies, replays the expert ids of
    # the first, as every update does.
    if recipe.router_replay == "R2":
        rescored, choices = jax.block_until_ready(
            logprobs_and_choices_of(objective, policy, batch.tokens, batch.valid)
        )
        batch = replace(batch, choices=choices)
        if not recipe.uses_entropy:
            return batch, rescored
    inputs = batch.tokens, batch.valid, objective.replayed(batch)
    if not recipe.uses_entropy:
        if networks.packs:
            scored = packed_scores(objective, policy, batch, networks.policy.bins)
        else:
            scored = logprobs_of(objective, policy, *inputs)
        return batch, jax.block_until_ready(scored)[0]
    scored = logprobs_and_entropy_of(objective, policy, *inputs)
    rescored, entropy = jax.block_until_ready(scored)
    return replace(batch, old_entropy=entropy), rescored


@partial(DeviceJit, static_argnums=0)
def targets_of(recipe: Recipe, batch: Batch[Array]) -> Targets[Array]:
    """Recipe's advantages and returns over the whole batch."""
    return recipe.targets(batch)


add_teacher_term = DeviceJit(add_teacher, static_argnums=0)
"""Term of the teacher in a step's advantages, `add_teacher`, compiled."""

correct_mismatch = DeviceJit(Correction.correct, static_argnums=0)
"""Mismatch correction of a step's batch, `Correction.correct`, compiled."""


@DeviceJit
def mismatch_metrics(logprobs: Array, old_logprobs: Array, mask: Array) -> dict[str, Array]:
    """Metrics of the mismatch between sampler and trainer, in the full policy of both."""
    differences = sampling_differences(logprobs, old_logprobs, mask)
    return {name: metric.value() for name, metric in differences.items()}


def with_targets(
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
    advantages, critic_mask, teacher_metrics = targets.advantages, targets.critic_mask, {}
    if (recipe.overlong_filter or recipe.uses_teacher) and targets.returns is not None:
        # The critic is trained on completions that are truncated or that a teacher cannot score.
        critic_mask = mask if critic_mask is None else critic_mask
    if recipe.uses_teacher:
        advantages, mask, teacher_metrics = add_teacher_term(recipe, batch, advantages, mask)
    if recipe.overlong_filter:
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
    metrics = correction.metrics | teacher_metrics
    if recipe.uses_entropy:
        # Updates compute no log-probabilities at an adaptive temperature (`PolicyObjective`).
        metrics = metrics | mismatch_metrics(required(rescored), sampler_logprobs, sampled_mask)
    batch = replace(
        batch,
        mask=correction.mask,
        advantages=advantages,
        returns=targets.returns,
        critic_mask=critic_mask,
        importance_weights=correction.importance_weights,
    )
    return batch, metrics


def train_on_batch(
    networks: Networks, state: TrainState[Array], batch: Batch[Array], randomness: Randomness
) -> tuple[TrainState[Array], list[dict[str, Outcome[Any]]], list[NonFinite], dict[str, float]]:
    """Runs all optimizer steps of one training step.

    Returns:
      The state, the outcome of each mini-batch under "actor" and "critic", the updates that were
      skipped because they were not finite, and the seconds spent.
    """
    recipe = networks.recipe
    # VC-PPO (arXiv:2503.01491): advantages by an untrained critic would mislead the policy, so only
    # the critic is trained first.
    pretraining = int(state.step) < recipe.value_pretraining_steps
    history: list[dict[str, Outcome[Any]]] = []
    nonfinite: list[NonFinite] = []
    seconds = {"timing_s/update_actor": 0.0, "timing_s/update_critic": 0.0}
    # Read from the devices once for all mini-batches of the step.
    counts = counts_of(batch) if networks.packs else None

    def learn(
        name: str, learner: Learner[Array], rows: Batch[Array], row_indices: np.ndarray
    ) -> Learner[Array]:
        begin = time.perf_counter()
        # The critic's mask may contain more tokens (T-PPO) or fewer than the policy's.
        if name == CRITIC and rows.critic_mask is not None:
            rows = replace(rows, mask=rows.critic_mask)
        # A row that was continued may have no token in this network's loss mask.
        all_rows = rows.finished is None
        if not all_rows:
            rows = clear_idle_rows(rows)
        row_counts = None
        if counts is not None:
            row_counts = counts.for_network(name, row_indices, all_rows)
        network, statistics = networks.trained[ROLES[name]], None
        if name == "actor" and recipe.uses_statistics:
            # With the current policy: a quantile over the mini-batch changes with every update.
            statistics = statistics_of(network.objective, learner.weights, rows)
        learner, outcome = update_rows(network, learner, rows, row_counts, statistics)
        # Scalars; reading them blocks until the update has finished, for the timing.
        history[-1][name] = outcome = to_host(outcome)
        if not outcome.finite:
            loss, norm = float(outcome.loss), float(outcome.grad_norm)
            nonfinite.append(NonFinite(name, rows, loss, norm))
        seconds[f"timing_s/update_{name}"] += time.perf_counter() - begin
        return learner

    for epoch in range(recipe.epochs):
        for row_indices in mini_batches(recipe, randomness.shuffler(int(state.step), epoch)):
            # A gather on the mesh: the batch is not copied to the host.
            rows = take_rows(batch, row_indices, networks.mesh)
            history.append({})
            heartbeat(f"mini-batch {len(history)}")
            for name, role in ROLES.items():
                if role in networks.trained and not (pretraining and role == POLICY):
                    learner = learn(name, state.networks[role], rows, row_indices)
                    state = state.with_network(role, learner)
    return state, history, nonfinite, seconds


def update_rows(
    network: Network[PolicyObjective] | Network[CriticObjective],
    learner: Learner[Array],
    rows: Batch[Array],
    row_counts: tuple[np.ndarray, np.ndarray] | None,
    statistics: Any = None,
    max_rows_per_bin: int = MAX_ROWS_PER_BIN,
) -> tuple[Learner[Array], Outcome[Any]]:
    """Runs one optimizer step on a mini-batch.

    Args:
      row_counts: number of tokens of each row, and of its tokens in the loss mask, by which rows
        are packed; None runs unpacked rows.
      max_rows_per_bin: maximum number of rows per bin, if they are packed.
    """
    if row_counts is None:
        return network.update(learner, rows, statistics)
    tokens, loss_tokens = row_counts
    if not loss_tokens.any():
        # Known to all processes alike; the update would change nothing.
        zero = np.zeros((), np.float32)
        return learner, Outcome(zero, zero, np.True_, np.True_)
    mesh = network.mesh
    # Its sizes are static, each set of them a compiled function; `plan` rounds them to a few.
    plan_of_rows = plan(
        tokens, loss_tokens, rows.tokens.shape[1], network.bins, mesh, max_rows_per_bin
    )
    network = replace(
        network,
        objective=replace(network.objective, packed=plan_of_rows.sizes),
        num_micro_batches=plan_of_rows.num_micro_batches,
    )
    # The number of micro-batches with rows is an argument, without recompilation.
    passes = to_devices(np.int32(plan_of_rows.passes), replicated(mesh))
    return network.update(learner, pack_rows(rows, plan_of_rows, mesh), statistics, passes)


def mini_batches(recipe: Recipe, shuffler: np.random.Generator) -> np.ndarray:
    """Row indices of each mini-batch of an epoch, ``[mini_batches, mini_batch]``.

    `Recipe.shuffled_rows` stay together. The order does not depend on layout or micro-batch: a step
    is the same however it is split.
    """
    units = np.arange(recipe.completions).reshape(-1, recipe.shuffled_rows)
    return shuffler.permutation(units).reshape(-1, recipe.mini_batch_size)


def sampling_difference(
    networks: Networks, state: TrainState[Array], batch: Batch[Array]
) -> dict[str, float]:
    """Metrics of the mismatch between sampler and trainer for a step that does not update the
    policy; empty for an adaptive temperature, where `prepare` has computed them."""
    # The policy was not updated in this step: these weights have sampled.
    objective = networks.policy.objective
    if not objective.sampling.recomputable:
        return {}
    _, recomputed = logprobs_of(
        objective, state.policy.weights, batch.tokens, batch.valid, objective.replayed(batch)
    )
    # Reduced on the devices: one number per name is copied to the host.
    compared = to_host(_mismatch_of(recomputed, required(batch.behaviour_logprobs), batch.mask))
    return {
        name: float(value)
        for name, value in compared["differences"].items()
        if compared["any_token"]
    }


@DeviceJit
def _mismatch_of(logprobs: Array, sampled: Array, mask: Array) -> dict[str, Any]:
    """Mismatch metrics of two log-probabilities, and true if any token is in the mask."""
    return {"differences": mismatch_metrics(logprobs, sampled, mask), "any_token": jnp.any(mask)}
