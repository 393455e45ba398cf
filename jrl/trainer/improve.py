"""What a step learns: from completions to advantages to optimiser steps."""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.losses import ExplainedVariance, Mean
from jrl.recipes.batch import Batch, Experience
from jrl.recipes.recipe import Recipe
from jrl.rollout.generate import settle
from jrl.rollout.scoring import score, value
from jrl.trainer.collect import Completions
from jrl.trainer.learner import Learner, update
from jrl.trainer.objectives import CriticObjective, PolicyObjective
from jrl.trainer.processes import to_devices, to_host
from jrl.trainer.setup import Setup
from jrl.trainer.state import TrainState
from moe import weights as moe_weights
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
        return settle(value(critic, tokens, valid, objective.rows, config, mesh)[0], mesh)

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
        return settle((scores.logprobs, scores.sampler_logprobs), mesh)

    return _over_rows(local, config, mesh)(policy, tokens, valid)


def _over_rows(local: Any, config: ModelConfig, mesh: FoldedMesh) -> Any:
    rows = PartitionSpec(mesh.dp)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(moe_weights.specs(config, mesh), rows, rows),
        out_specs=rows,
    )


@partial(jax.jit, static_argnums=0)
def advantages_of(recipe: Recipe, experience: Experience[Array]) -> tuple[Array, Array | None]:
    """The recipe's advantages and returns over the whole batch."""
    return recipe.advantages(experience)


def experience_of(
    setup: Setup, state: TrainState[Array], completions: Completions
) -> tuple[Experience[Array], Batch[Array]]:
    """Everything known before the first update, and the batch that the updates learn from."""
    recipe, rollout = setup.recipe, to_devices(completions.rollout, setup.over_rows)
    scores = completions.scores
    if setup.run.shuffle_rewards:
        scores = setup.shuffler(int(state.step), -1 % 2**32).permutation(scores)
    lengths = completions.lengths
    values = reference = None
    if state.critic is not None:
        values = values_of(
            setup.critic_objective, state.critic.weights, rollout.tokens, rollout.valid
        )
    if state.reference is not None:
        reference = logprobs_of(
            setup.policy_objective, state.reference, rollout.tokens, rollout.valid
        )[0]
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
        old_logprobs=rollout.policy_logprobs,
        reference_logprobs=reference,
    )
    advantages, returns = advantages_of(recipe, experience)
    batch = Batch(
        tokens=rollout.tokens,
        valid=rollout.valid,
        mask=rollout.mask,
        old_logprobs=rollout.policy_logprobs,
        sampler_logprobs=rollout.logprobs,
        advantages=advantages,
        correct=to_devices(scores == 1.0, setup.over_rows),
        returns=returns,
        old_values=values,
        reference_logprobs=reference,
    )
    return experience, batch


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
        # Rows that share a prompt stay together where a piece can hold them. The layout has no say
        # in it: a step is the same on all of them.
        together = 1 if recipe.piece % recipe.group_size else recipe.group_size
        runs = np.arange(recipe.completions).reshape(-1, together)
        order = setup.shuffler(int(state.step), epoch).permutation(runs)
        for chosen in order.reshape(-1, recipe.rows_per_update):
            rows = to_devices(jax.tree.map(lambda x, c=chosen: x[c], host), setup.over_rows)
            history.append({})
            if state.critic is not None:
                state = replace(state, critic=learn("critic", state.critic, rows))
            if not pretraining:
                state = replace(state, policy=learn("actor", state.policy, rows))
    return state, history, nonfinite, seconds


def sampling_difference(
    setup: Setup, state: TrainState[Array], batch: Batch[Array]
) -> dict[str, float]:
    """How far sampler and trainer differ, where no update of the policy has measured it already."""
    _, again = logprobs_of(setup.policy_objective, state.policy.weights, batch.tokens, batch.valid)
    again, sampled, mask = to_host((again, batch.sampler_logprobs, batch.mask))
    difference = np.abs(again - sampled)[mask]
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
    }


def summarise(history: list[dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The metrics of a step from those of its mini-batches.

    Means are means over all tokens of the step; losses and gradient norms are averaged over
    mini-batches. The difference between sampler and trainer is that of the first mini-batch, whose
    policy is still the one that sampled.
    """
    summary: dict[str, float] = {}
    for network in ("actor", "critic"):
        updates = [entry[network] for entry in history if network in entry]
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
            elif name != "finite":
                own = f"{network}/{name}" if name in ("loss", "grad_norm") else name
                summary[own] = float(np.mean(every))
    return summary


def _load(assignments: np.ndarray) -> dict[str, float]:
    """How uneven the experts' load is, ``[layer, expert]``: 1 is even."""
    share = assignments / np.maximum(assignments.mean(axis=1, keepdims=True), 1.0)
    return {
        "moe/max_load": float(share.max(axis=1).mean()),
        "moe/min_load": float(share.min(axis=1).mean()),
    }
