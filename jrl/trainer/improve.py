"""What a step learns: from completions to advantages to optimiser steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.losses import ExplainedVariance, Mean
from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.batch import Batch, Experience, given
from jrl.recipes.mismatch import Corrected, Correction
from jrl.recipes.recipe import Recipe
from jrl.rollout.generate import Rollout, mark_replicated
from jrl.rollout.scoring import score, value
from jrl.trainer.collect import Completions
from jrl.trainer.learner import Learner, update
from jrl.trainer.objectives import CriticObjective, PolicyObjective
from jrl.trainer.setup import Setup
from jrl.trainer.state import TrainState
from moe import placement
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@dataclass(frozen=True)
class NonFinite:
    """An update that was left out, with the rows it would have learned from."""

    network: str
    batch: Batch[Array]
    loss: float
    grad_norm: float


@partial(jax.jit, static_argnums=0)
def values_of(
    objective: CriticObjective, critic: Transformer[Array], tokens: Array, valid: Array
) -> Array:
    """The critic's values of all response tokens, on global arrays."""
    config, mesh = objective.config, objective.mesh

    def local(critic, tokens, valid):
        return mark_replicated(value(critic, tokens, valid, objective.rows, config, mesh)[0], mesh)

    return _over_rows(local, config, mesh)(critic, tokens, valid)


@partial(jax.jit, static_argnums=0)
def logprobs_of(
    objective: PolicyObjective, policy: Transformer[Array], tokens: Array, valid: Array
) -> tuple[Array, Array]:
    """A policy's log-probabilities of all response tokens, on global arrays: in the whole policy,
    and in the distribution that tokens are drawn from."""
    config, mesh = objective.config, objective.mesh

    def local(policy, tokens, valid):
        scores = score(policy, tokens, valid, objective.rows, config, objective.sampling, mesh)
        return mark_replicated((scores.logprobs, scores.sampler_logprobs), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid)


def _over_rows(local: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    rows = PartitionSpec(mesh.dp)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(placement.specs(config, mesh), rows, rows),
        out_specs=rows,
    )


@partial(jax.jit, static_argnums=0)
def advantages_of(recipe: Recipe, experience: Experience[Array]) -> tuple[Array, Array | None]:
    """The recipe's advantages and returns over the whole batch."""
    return recipe.advantages(experience)


@partial(jax.jit, static_argnums=0)
def corrected(
    correction: Correction, logprobs: Array, sampler_logprobs: Array, mask: Array
) -> Corrected:
    """What a step learns from, by how far the sampler is from the trainer."""
    return correction.correct(logprobs, sampler_logprobs, mask)


def experience_of(
    setup: Setup, state: TrainState[Array], completions: Completions
) -> tuple[Experience[Array], Batch[Array], dict[str, float]]:
    """Everything known before the first update, and the batch that the updates learn from.

    Advantages are those of completions as they were sampled; what is rejected after that counts in
    no loss.

    Returns:
      The two, and metrics: the seconds of each phase and, where the trainer scores the completions
      too, how far the sampler is from it.
    """
    recipe, rollout = setup.recipe, to_devices(completions.rollout, setup.over_rows)
    rows, seconds = (rollout.tokens, rollout.valid), dict[str, float]()
    scores = completions.scores
    if setup.run.shuffle_rewards:
        scores = setup.shuffler(int(state.step), -1 % 2**32).permutation(scores)
    values = reference = rescored = None
    if state.critic is not None:
        with _timed("timing_s/values", seconds):
            critic = state.critic.weights
            values = jax.block_until_ready(values_of(setup.critic_objective, critic, *rows))
    if state.reference is not None:
        with _timed("timing_s/ref", seconds):
            scored = logprobs_of(setup.policy_objective, state.reference, *rows)
            reference = jax.block_until_ready(scored)[0]
    if recipe.rescores:
        with _timed("timing_s/old_log_prob", seconds):
            scored = logprobs_of(setup.policy_objective, state.policy.weights, *rows)
            rescored = jax.block_until_ready(scored)[0]
    with _timed("timing_s/adv", seconds):
        experience, batch, metrics = _experience_of(
            setup, completions, rollout, scores, values, reference, rescored
        )
        jax.block_until_ready((experience, batch))
        metrics = {name: float(value) for name, value in to_host(metrics).items()}
    return experience, batch, metrics | seconds


def _experience_of(
    setup: Setup,
    completions: Completions,
    rollout: Rollout[Array],
    scores: np.ndarray,
    values: Array | None,
    reference: Array | None,
    rescored: Array | None,
) -> tuple[Experience[Array], Batch[Array], dict[str, Array]]:
    """`experience_of`, once the networks have said what they have to say.

    Args:
      scores: of the completions, shuffled where that is asked for.
      rescored: log-probabilities of the policy as the trainer computes them, None without.
    """
    recipe, lengths = setup.recipe, completions.lengths
    anchor = recipe.old_logprobs == "recompute"
    old_logprobs = given(rescored) if anchor else rollout.policy_logprobs
    experience = Experience(
        mask=rollout.mask,
        rewards=to_devices(
            recipe.rewards(jnp.asarray(scores), jnp.asarray(lengths), setup.response_length),
            setup.over_rows,
        ),
        groups=to_devices(completions.groups, setup.over_rows),
        lengths=to_devices(lengths, setup.over_rows),
        truncated=rollout.truncated,
        values=values,
        old_logprobs=old_logprobs,
        reference_logprobs=reference,
    )
    advantages, returns = advantages_of(recipe, experience)
    learned = Corrected(rollout.mask, None, {})
    if rescored is not None:
        # In the whole policy: that top-k and top-p cut tokens away is no mismatch.
        learned = corrected(recipe.correction, rescored, rollout.policy_logprobs, rollout.mask)
    batch = Batch(
        tokens=rollout.tokens,
        valid=rollout.valid,
        mask=learned.mask,
        old_logprobs=old_logprobs,
        sampler_logprobs=rollout.logprobs,
        advantages=advantages,
        correct=to_devices(scores == 1.0, setup.over_rows),
        returns=returns,
        old_values=values,
        reference_logprobs=reference,
        importance_weights=learned.importance_weights,
    )
    return experience, batch, learned.metrics


@contextmanager
def _timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the time of its body, which waits for what it dispatches."""
    begin = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin


def improve(
    setup: Setup, state: TrainState[Array], batch: Batch[Array]
) -> tuple[TrainState[Array], list[dict[str, dict[str, Any]]], list[NonFinite], dict[str, float]]:
    """All optimiser steps of one training step.

    Returns:
      The state, the metrics of each mini-batch under "policy" and "critic", the updates that were
      left out because they were not finite, and the seconds spent.
    """
    recipe = setup.recipe
    pretraining = int(state.step) < recipe.value_pretraining_steps
    history: list[dict[str, dict[str, Any]]] = []
    nonfinite: list[NonFinite] = []
    seconds = {"timing_s/update_actor": 0.0, "timing_s/update_critic": 0.0}

    def learn(network: str, learner: Learner[Array], rows: Batch[Array]) -> Learner[Array]:
        begin = time.perf_counter()
        if network == "actor":
            objective, optimiser = setup.policy_objective, setup.policy_optimiser
        else:
            objective, optimiser = setup.critic_objective, setup.critic_optimiser
        learner, metrics = update(objective, optimiser, setup.num_micro, learner, rows)
        history[-1][network] = metrics = to_host(metrics)
        if not metrics["finite"]:
            nonfinite.append(
                NonFinite(network, rows, float(metrics["loss"]), float(metrics["grad_norm"]))
            )
        seconds[f"timing_s/update_{network}"] += time.perf_counter() - begin
        return learner

    host = to_host(batch)
    for epoch in range(recipe.epochs):
        for chosen in mini_batches(recipe, setup.shuffler(int(state.step), epoch)):
            rows = to_devices(jax.tree.map(lambda x, c=chosen: x[c], host), setup.over_rows)
            history.append({})
            if state.critic is not None:
                state = replace(state, critic=learn("critic", state.critic, rows))
            if not pretraining:
                state = replace(state, policy=learn("actor", state.policy, rows))
    return state, history, nonfinite, seconds


def mini_batches(recipe: Recipe, shuffler: np.random.Generator) -> np.ndarray:
    """The rows of each mini-batch of an epoch, ``[mini_batches, mini_batch]``.

    Whole groups are shuffled where they fill mini-batches, so that completions can share their
    prompt in a forward pass, and single rows where they do not. Neither the layout nor the
    micro-batch has a say in it: a step is the same however it is cut.
    """
    together = 1 if recipe.rows_per_update % recipe.group_size else recipe.group_size
    groups = np.arange(recipe.completions).reshape(-1, together)
    return shuffler.permutation(groups).reshape(-1, recipe.rows_per_update)


def sampling_difference(
    setup: Setup, state: TrainState[Array], batch: Batch[Array]
) -> dict[str, float]:
    """How far sampler and trainer differ, where no update of the policy has measured it already."""
    _, again = logprobs_of(setup.policy_objective, state.policy.weights, batch.tokens, batch.valid)
    again, sampled, mask = to_host((again, batch.sampler_logprobs, batch.mask))
    if not mask.any():
        return {}
    difference = np.abs(again - sampled)[mask]
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
    }


def summarise(history: list[dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The metrics of a step from those of its mini-batches.

    Means are means over all tokens of the step; losses and gradient norms are averaged over the
    mini-batches in which a token counts, and without any there are none. The difference between
    sampler and trainer is that of the first mini-batch, whose policy is still the one that sampled.
    """
    summary: dict[str, float] = {}
    for network in ("actor", "critic"):
        updates = [entry[network] for entry in history if network in entry]
        updates = [metrics for metrics in updates if not metrics["empty"]]
        if not updates:
            continue
        for name, first in updates[0].items():
            every = [entry[name] for entry in updates]
            if name.startswith("sampling/"):
                summary[name] = float(first.value())
            elif isinstance(first, Mean | ExplainedVariance):
                summary[name] = float(sum(every[1:], first).value())
            elif name == "load":
                # The critic's experts are balanced too, and not plotted.
                summary |= _load(np.sum(every, axis=0)) if network == "actor" else {}
            elif name not in ("finite", "empty"):
                own = f"{network}/{name}" if name in ("loss", "grad_norm") else name
                summary[own] = float(np.mean(every))
    return summary


def count_updates(history: list[dict[str, dict[str, Any]]]) -> dict[str, float]:
    """How many updates of a step were made and left out."""
    everything = [metrics for entry in history for metrics in entry.values()]
    actor = [entry["actor"] for entry in history if "actor" in entry]
    return {
        "training/optimizer_steps": float(sum(_moved(metrics) for metrics in actor)),
        "training/nonfinite_skipped": float(sum(not metrics["finite"] for metrics in everything)),
        "training/empty_skipped": float(sum(_is_empty(metrics) for metrics in everything)),
    }


def _moved(metrics: dict[str, Any]) -> bool:
    return bool(metrics["finite"]) and not metrics["empty"]


def _is_empty(metrics: dict[str, Any]) -> bool:
    """Whether an update was left out for want of tokens, and for nothing worse."""
    return bool(metrics["finite"]) and bool(metrics["empty"])


def _load(assignments: np.ndarray) -> dict[str, float]:
    """How uneven the experts' load is, ``[layer, expert]``: 1 is even."""
    share = assignments / np.maximum(assignments.mean(axis=1, keepdims=True), 1.0)
    return {
        "moe/max_load": float(share.max(axis=1).mean()),
        "moe/min_load": float(share.min(axis=1).mean()),
    }
