"""A critic tried on held-out prompts: completions of the policy with the critic's values."""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.losses import length_adaptive_lambda
from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.actor_critic import ActorCritic
from jrl.recipes.ppo import Ppo
from jrl.recipes.recipe import terminal_rewards
from jrl.recipes.vapo import Vapo
from jrl.report.critic import CriticRollout
from jrl.rollout.sampling import Sampling
from jrl.rollout.scoring import Rows
from jrl.trainer.collect import sample
from jrl.trainer.evaluation import filled_up, heldout_examples
from jrl.trainer.improve import values_of
from jrl.trainer.setup import Setup
from moe.weights import Transformer

ROWS_AT_ONCE = 1024
"""Completions decoded and valued in one call, about; it bounds the memory."""


def evaluate_critic(
    setup: Setup,
    policy: Transformer[Array],
    critic: Transformer[Array],
    sampling: Sampling,
    *,
    num_prompts: int,
    k: int,
    seed: int,
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> CriticRollout:
    """Completions of held-out prompts, `k` of each, with the critic's values.

    Args:
      sampling: how completions are drawn.
      num_prompts: held-out prompts, or all there are if they are fewer.
      k: completions per prompt.
      seed: of sampling.
      report: called with "critic", the completions done and all there will be.

    Raises:
      ValueError: where the recipe trains no critic.
    """
    recipe = setup.critic_objective.recipe
    objective = replace(setup.critic_objective, rows=Rows(setup.prompt_length, copies=1))
    decoder, key = setup.decoder(sampling, k), jax.random.key(seed)
    examples = heldout_examples(setup, num_prompts)
    report("critic", 0, len(examples) * k)
    pieces, size = [], _batch_size(setup, len(examples), k)
    batches = filled_up(examples, size)
    for number, start in enumerate(range(0, len(batches), size)):
        batch, own_key = batches[start : start + size], jax.random.fold_in(key, number)
        drawn = sample(setup, decoder, policy, batch, own_key)
        tokens, valid = to_devices((drawn.rollout.tokens, drawn.rollout.valid), setup.over_rows)
        values = to_host(values_of(objective, critic, tokens, valid))
        # What fills up the last batch is left out again.
        rows = slice(min(size, len(examples) - start) * k)
        columns = (values, drawn.rollout.mask, drawn.scores, drawn.groups + start, drawn.lengths)
        pieces.append([column[rows] for column in columns])
        report("critic", min(start + size, len(examples)) * k, len(examples) * k)
    values, mask, scores, groups, lengths = map(np.concatenate, zip(*pieces, strict=True))
    rewards = recipe.rewards(jnp.asarray(scores), jnp.asarray(lengths), setup.response_length)
    return CriticRollout(
        values=values,
        rewards=np.asarray(terminal_rewards(rewards, jnp.asarray(mask))),
        mask=np.asarray(mask, bool),
        correct=scores == 1.0,
        groups=groups,
        lam=_lam(recipe, lengths),
        gamma=recipe.gamma,
        low=recipe.reward_wrong,
        high=recipe.reward_correct,
        alpha=recipe.lam_alpha if isinstance(recipe, Vapo) else None,
    )


def _batch_size(setup: Setup, num_prompts: int, k: int) -> int:
    """Prompts that are decoded and valued at a time: they divide over the devices."""
    mesh = setup.mesh
    unit = math.lcm(setup.rollout_ranks, mesh.size((*mesh.dp, *mesh.tp)))
    return min(num_prompts, max(1, ROWS_AT_ONCE // k)) // unit * unit or unit


def _lam(recipe: ActorCritic, lengths: np.ndarray) -> float | np.ndarray:
    """The lambda of the recipe's policy, for each response where it adapts."""
    if isinstance(recipe, Vapo):
        adapted = length_adaptive_lambda(jnp.asarray(lengths), alpha=recipe.lam_alpha)
        return np.asarray(adapted)[:, None]
    if isinstance(recipe, Ppo):
        return recipe.lam
    raise ValueError(f"recipe {recipe.name} does not say with which lambda it makes advantages.")
