"""Evaluation of a critic on held-out prompts: completions of the policy with critic values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import per_turn_rewards
from jrl.report.critic import CriticRollout
from jrl.rollout.collection.collect import batch_of_completions, groups_of
from jrl.rollout.decoding.slots import ranks
from jrl.rollout.sampler import Sampler, correct_of, numbered_heldout, scores_of
from jrl.rollout.sampling import Sampling
from jrl.trainer.evaluation.evaluate import heldout_examples, pad_with_repeats
from jrl.trainer.learner.networks import Network
from jrl.trainer.learner.objectives import CriticObjective
from jrl.trainer.prepare import add_verdicts
from jrl.trainer.scoring import values_of
from moe.weights import Transformer
from sharding.folding import FoldedMesh

MAX_ROWS_PER_CALL = 1024
"""Approximate number of completions decoded and scored in one call; bounds the memory."""

_rewards = jax.jit(per_turn_rewards)


def evaluate_critic(
    sampler: Sampler,
    network: Network[CriticObjective],
    critic: Transformer[Array],
    sampling: Sampling,
    *,
    num_prompts: int,
    k: int,
    report: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> CriticRollout:
    """Samples `k` completions of each held-out prompt, and scores them with the critic.

    Rewards are those of training, in a multi-turn conversation on the last token of each turn,
    without a KL penalty, which needs the reference model.

    Args:
      sampler: with the policy loaded.
      network: the critic's network.
      critic: its weights.
      sampling: sampling parameters.
      num_prompts: held-out prompts, or all there are if they are fewer.
      k: completions per prompt.
      report: called with "critic", the completions done and all there will be.
    """
    # Training shares prompts in groups of its own size, which `k` need not be.
    recipe, objective = network.objective.recipe, network.objective.for_separate_rows()
    examples = numbered_heldout(heldout_examples(sampler.task, num_prompts))
    report("critic", 0, len(examples) * k)
    size = _batch_size(network.mesh, len(examples), k)
    batches, prompt_ids = [], list(examples)
    for start in range(0, len(prompt_ids), size):
        batch_examples = {
            prompt_id: examples[prompt_id] for prompt_id in prompt_ids[start : start + size]
        }
        completions = sampler.sample(batch_examples, sampling, k)
        # The last batch is padded to divide over the devices; padding is removed below.
        rows = pad_with_repeats(completions, size * k)
        all_rows = np.ones(len(rows), bool)
        batch = batch_of_completions(sampler, rows, all_rows, network.mesh)
        batch = add_verdicts(objective, rows, scores_of(rows), correct_of(rows), batch)
        values = values_of(objective, critic, batch.tokens, batch.valid)
        # The critic was trained to predict rewards of the recipe, not scores.
        arrays = to_host((values, _rewards(batch), batch.mask, batch.lengths))
        columns = (*arrays, correct_of(rows), groups_of(rows))
        batches.append([column[: len(completions)] for column in columns])
        report("critic", min(start + size, len(examples)) * k, len(examples) * k)
    arrays_of_all = map(np.concatenate, zip(*batches, strict=True))
    values, rewards, mask, lengths, correct, groups = arrays_of_all
    return CriticRollout(
        values=values,
        rewards=rewards,
        mask=np.asarray(mask, bool),
        correct=correct,
        groups=-1 - groups,  # ids of held-out prompts count down from -1
        lam=np.asarray(recipe.policy_lambda(jnp.asarray(lengths))),
        gamma=recipe.discount,
        low=recipe.reward_wrong,
        high=recipe.reward_correct,
        alpha=recipe.length_adaptive_alpha,
    )


def _batch_size(mesh: FoldedMesh, num_prompts: int, k: int) -> int:
    """Number of prompts that are decoded and scored at a time, divisible over the devices."""
    unit = ranks(mesh)
    return min(num_prompts, max(1, MAX_ROWS_PER_CALL // k)) // unit * unit or unit
