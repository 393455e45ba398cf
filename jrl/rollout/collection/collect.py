"""What a step learns from: completions sampled, verified and, as the recipe asks, filtered or
written on for a window."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from jrl.recipes.base.batch import Batch, given
from jrl.recipes.base.collection import DynamicSampling, Windows
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.batching import batch_from_host, batch_of
from jrl.rollout.collection.dynamic_sampling import DynamicSampler
from jrl.rollout.collection.windows import Unfinished, write_windows
from jrl.rollout.decoding.requests import taken_off
from jrl.rollout.sampler import Completion, Sampler, in_order
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
"""What sampling says of itself but for times; the last ones with dynamic sampling alone."""


@dataclass
class Collected:
    """What one step sampled, and how that went.

    Attributes:
      completions: those to learn from, on the host; samples of one prompt stand together.
      batch: the same on the mesh of training.
      prompts_seen: training prompts drawn so far, this step's included.
      unfinished: responses that the next step goes on with; None where a step leaves none.
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
    """Completions for one step, as the recipe's `collection` says.

    With dynamic sampling, groups whose scores are all equal teach nothing and are replaced by
    groups of further prompts, as long as there are no more than `max_rounds` times those of a step.
    What is still missing then is filled with uninformative groups whose tokens do not count, and
    the metrics say so.

    Args:
      sampler: with the policy loaded.
      mesh: of training.
      prompts_seen: training prompts drawn before.
      unfinished: responses to go on with, where the recipe writes windows.
    """
    collection, sampling = recipe.collection, sampling_of(recipe)
    seconds = {"timing_s/gen": 0.0, "timing_s/reward": 0.0}
    counts, own = np.ones(recipe.completions, bool), dict[str, float]()
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
        drawn, informative = finder.find()
        # Only those that were needed: what was begun in advance is drawn again in the next step.
        prompts_seen += len(informative)
        completions, counts = chosen_of(recipe, drawn, informative)
        own = generation_metrics(recipe, informative, counts)
    elif isinstance(collection, Windows):
        assert unfinished is not None
        written, prompts_seen, unfinished = write_windows(
            sampler, recipe, given(collection.window), sampling, prompts_seen, unfinished, seconds
        )
        # They come as they end: sorted, what is learned from does not depend on that.
        drawn = completions = in_order(written)
    else:
        # Prompts have numbers in the order of the task, by which all that is drawn for them is told
        # apart.
        numbers = range(prompts_seen, prompts_seen + recipe.prompts)
        asked = {number: sampler.task.train(number) for number in numbers}
        drawn = completions = sampler.sample(asked, sampling, recipe.group_size, seconds=seconds)
        prompts_seen = numbers.stop
    used = sampler.engine.usage.since(before)
    return Collected(
        completions=completions,
        batch=batch_of_completions(sampler, completions, counts, mesh),
        prompts_seen=prompts_seen,
        unfinished=unfinished,
        metrics=verifier_counts(drawn) | own,
        seconds=seconds | used.metrics(),
    )


def batch_of_completions(
    sampler: Sampler, completions: Sequence[Completion], counts: np.ndarray, mesh: FoldedMesh
) -> Batch[Array]:
    """The completions as rows, in their order.

    Args:
      sampler: that drew them.
      counts: ``[completions]`` bool; the mask of the others is false throughout.
      mesh: of training.
    """
    trajectories = [completion.trajectory for completion in completions]
    lengths = sampler.prompt_length, sampler.response_length
    if all(trajectory.shelf is not None for trajectory in trajectories):
        return batch_of(trajectories, counts, mesh, *lengths)
    # Conversations are on the host, where their environments are.
    off, no_expert = taken_off(trajectories), 0
    if (choices := off[0].sampled.choices) is not None:
        no_expert = int(choices[-1, 0, 0])  # the token that ended it was never run
    pad_id = sampler.format.tokenizer.pad_id
    return batch_from_host(off, counts, mesh, *lengths, pad_id, no_expert)


def chosen_of(
    recipe: Recipe, drawn: list[Completion], informative: np.ndarray
) -> tuple[list[Completion], np.ndarray]:
    """A step's completions, and which of them count.

    Args:
      drawn: whole groups.
      informative: ``[group]`` which of them have scores that differ.
    """
    of_row = np.repeat(informative, recipe.group_size)
    # Stable, so groups stay together and come in the order of their prompts.
    order = np.argsort(~of_row, kind="stable")[: recipe.completions]
    return [drawn[row] for row in order], of_row[order]


def generation_metrics(
    recipe: Recipe, informative: np.ndarray, counts: np.ndarray
) -> dict[str, float]:
    """How dynamic sampling went.

    Args:
      informative: ``[group]`` of all that were drawn.
      counts: ``[completions]`` of those that are learned from.
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


def verifier_counts(drawn: Sequence[Completion]) -> dict[str, float]:
    """Verdicts by their reasons, of everything that was verified: the verifier's work does not end
    where groups are dropped."""
    reasons = Counter(each.verdict.reason for each in drawn if each.verdict is not None)
    return {f"verifier/{reason}": float(reasons[reason]) for reason in REASONS}


def sampling_of(recipe: Recipe) -> Sampling:
    """How the completions that are learned from are drawn."""
    return Sampling(recipe.temperature, recipe.top_k, recipe.top_p, recipe.temperature_rule)


def groups_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` the number of each one's prompt."""
    return np.array([c.trajectory.request.prompt for c in completions], np.int32)


def shown_rows(completions: Sequence[Completion], number: int) -> list[int]:
    """Some completions to look at, in their order: two of a prompt as long as there are others."""
    rows = np.arange(len(completions))
    begins = np.diff(groups_of(completions), prepend=-1) != 0
    place = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return sorted(np.argsort(place // 2, kind="stable")[:number].tolist())
