"""Collection of a step's training batch: completions are sampled, verified and, depending on the
recipe, filtered by dynamic sampling or continued for a window."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from jrl.recipes.base.batch import Batch, required
from jrl.recipes.base.recipe import DynamicSampling, Recipe, Windows
from jrl.rollout.batching import batch_from_host, batch_of
from jrl.rollout.collection.dynamic_sampling import DynamicSampler
from jrl.rollout.collection.windows import Unfinished, sample_windows
from jrl.rollout.decoding.requests import move_to_host
from jrl.rollout.sampler import Completion, Sampler, sort_completions
from jrl.rollout.sampling import Sampling
from jrl.tasks import REASONS
from sharding.folding import FoldedMesh

GENERATION = (
    "train/num_gen_batches",
    "dynamic_sampling/prompts_generated",
    "dynamic_sampling/prompts_kept",
    "dynamic_sampling/filtered",
    "dynamic_sampling/gave_up",
)
METRICS = (*(f"verifier/{reason}" for reason in REASONS), *GENERATION)
"""Metrics of sampling except times; the last ones with dynamic sampling only."""


@dataclass
class Collected:
    """Training batch of one step, with the metrics of its collection.

    Attributes:
      completions: those to train on, on the host; samples of one prompt are contiguous.
      batch: the same on the mesh of training.
      prompts_seen: training prompts used so far, including this step's.
      unfinished: responses that the next step continues; None without partial rollouts.
      metrics: of sampling and verification.
      seconds: spent in decoding and in verification.
    """

    completions: list[Completion]
    batch: Batch[Array]
    prompts_seen: int
    unfinished: Unfinished[np.ndarray] | None
    metrics: dict[str, float]
    seconds: dict[str, float]


def collect(
    sampler: Sampler,
    recipe: Recipe,
    mesh: FoldedMesh,
    prompts_seen: int,
    unfinished: Unfinished[np.ndarray] | None = None,
) -> Collected:
    """Collects the completions of one step, by the recipe's `collection`.

    With dynamic sampling, groups whose scores are all equal have zero advantages and are replaced
    by groups of further prompts, up to `max_rounds` times the prompts of a step. If groups are
    still missing then, the batch is padded with uninformative groups outside of the loss mask, and
    the metrics report it.

    Args:
      sampler: with the policy loaded.
      mesh: of training.
      prompts_seen: training prompts used before.
      unfinished: responses to continue, where the recipe uses windows.
    """
    collection, sampling = recipe.collection, sampling_of(recipe)
    seconds = {"timing_s/gen": 0.0, "timing_s/reward": 0.0}
    counts, generation = np.ones(recipe.completions, bool), dict[str, float]()
    before = sampler.engine.usage.copy()
    if isinstance(collection, DynamicSampling):
        finder = DynamicSampler(
            sampler,
            recipe,
            sampling,
            first=prompts_seen,
            most=collection.max_rounds * recipe.prompts,
            seconds=seconds,
        )
        sampled, informative = finder.find()
        # Only those that were needed: prompts prefetched beyond are sampled again in the next step.
        prompts_seen += len(informative)
        completions, counts = select_completions(recipe, sampled, informative)
        generation = generation_metrics(recipe, informative, counts)
    elif isinstance(collection, Windows):
        assert unfinished is not None
        continued, prompts_seen, unfinished = sample_windows(
            sampler,
            recipe,
            required(collection.window),
            sampling,
            prompts_seen,
            unfinished,
            seconds,
        )
        # They arrive as they finish: sorted, so that the batch does not depend on that order.
        sampled = completions = sort_completions(continued)
    else:
        # Prompt ids count in the order of the task; they determine the RNG keys of a prompt.
        prompts = range(prompts_seen, prompts_seen + recipe.prompts)
        examples = {prompt: sampler.task.train(prompt) for prompt in prompts}
        sampled = completions = sampler.sample(
            examples, sampling, recipe.group_size, seconds=seconds
        )
        prompts_seen = prompts.stop
    used = sampler.engine.usage.since(before)
    return Collected(
        completions=completions,
        batch=batch_of_completions(sampler, completions, counts, mesh),
        prompts_seen=prompts_seen,
        unfinished=unfinished,
        metrics=verifier_counts(sampled) | generation,
        seconds=seconds | used.metrics(),
    )


def batch_of_completions(
    sampler: Sampler, completions: Sequence[Completion], counts: np.ndarray, mesh: FoldedMesh
) -> Batch[Array]:
    """Batch of the completions as rows, in their order.

    Args:
      sampler: that sampled them.
      counts: ``[completions]`` bool, rows in the loss; the mask of the others is all false.
      mesh: of training.
    """
    trajectories = [completion.trajectory for completion in completions]
    lengths = sampler.prompt_length, sampler.response_length
    if all(trajectory.buffer is not None for trajectory in trajectories):
        return batch_of(trajectories, counts, mesh, *lengths)
    # Conversations are on the host, where their environments are.
    on_host, no_expert = move_to_host(trajectories), 0
    if (choices := on_host[0].sampled.choices) is not None:
        no_expert = int(choices[-1, 0, 0])  # the token that ended it was never run
    pad_id = sampler.format.tokenizer.pad_id
    return batch_from_host(on_host, counts, mesh, *lengths, pad_id, no_expert)


def select_completions(
    recipe: Recipe, sampled: list[Completion], informative: np.ndarray
) -> tuple[list[Completion], np.ndarray]:
    """Selects a step's completions, informative groups first; returns them with their loss flags.

    Args:
      sampled: whole groups.
      informative: ``[group]`` true for groups with unequal scores.
    """
    in_loss = np.repeat(informative, recipe.group_size)
    # Stable, so groups stay contiguous and in the order of their prompts.
    order = np.argsort(~in_loss, kind="stable")[: recipe.completions]
    return [sampled[row] for row in order], in_loss[order]


def generation_metrics(
    recipe: Recipe, informative: np.ndarray, counts: np.ndarray
) -> dict[str, float]:
    """Metrics of dynamic sampling.

    Args:
      informative: ``[group]`` of all sampled groups.
      counts: ``[completions]`` loss flags of the batch.
    """
    generated = len(informative)
    values = (
        generated / recipe.prompts,
        float(generated),
        float(counts.sum() / recipe.group_size),
        1 - int(informative.sum()) / generated,
        float(not counts.all()),
    )
    return dict(zip(GENERATION, values, strict=True))


def verifier_counts(completions: Sequence[Completion]) -> dict[str, float]:
    """Number of verdicts by reason, over all verified completions, including those of dropped
    groups."""
    reasons = Counter(each.verdict.reason for each in completions if each.verdict is not None)
    return {f"verifier/{reason}": float(reasons[reason]) for reason in REASONS}


def sampling_of(recipe: Recipe) -> Sampling:
    """Sampling parameters of the training completions."""
    return Sampling(recipe.temperature, recipe.top_k, recipe.top_p, recipe.temperature_rule)


def groups_of(completions: Sequence[Completion]) -> np.ndarray:
    """Prompt id of each completion, ``[completions]``."""
    return np.array([c.trajectory.request.prompt for c in completions], np.int32)


def shown_rows(completions: Sequence[Completion], max_rows: int) -> list[int]:
    """Indices of completions to show, in their order: at most two per prompt while other prompts
    are left."""
    rows = np.arange(len(completions))
    is_first = np.diff(groups_of(completions), prepend=-1) != 0
    rank_in_prompt = rows - np.maximum.accumulate(np.where(is_first, rows, 0))
    return sorted(np.argsort(rank_in_prompt // 2, kind="stable")[:max_rows].tolist())
