"""What a step learns from: completions sampled, verified and, where sampling is dynamic,
filtered."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.losses import EntropyStatistics, informative_groups
from jrl.recipes.base.batch import Batch
from jrl.recipes.base.collection import DynamicSampling
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.batching import batch_of
from jrl.rollout.sampler import Completion, Sampler, scores_of
from jrl.rollout.sampling import Sampling
from jrl.tasks import REASONS
from sharding.folding import FoldedMesh


@dataclass
class Collected:
    """What one step sampled, and how that went.

    Attributes:
      completions: those to learn from, on the host; samples of one prompt stand together.
      batch: the same on the mesh of training.
      prompts_seen: training prompts drawn so far, this step's included.
      metrics: of sampling and verification.
      seconds: spent in decoding and in verification.
    """

    completions: list[Completion]
    batch: Batch[Array]
    prompts_seen: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def collect(
    sampler: Sampler,
    recipe: Recipe,
    mesh: FoldedMesh,
    prompts_seen: int,
    key: Callable[[int], Array],
    entropy: EntropyStatistics[Array] | None = None,
) -> Collected:
    """Completions for one step, as the recipe's `collection` says.

    With dynamic sampling, groups whose scores are all equal teach nothing and are replaced by
    groups of further prompts, for at most `max_rounds` rounds. What is still missing then is filled
    with uninformative groups whose tokens do not count, and the metrics say so.

    Args:
      sampler: with the policy loaded.
      mesh: of training.
      prompts_seen: training prompts drawn before.
      key: the randomness of a round, by its number.
      entropy: statistics of the step before, for a temperature that adapts.
    """
    collection, seconds = recipe.collection, dict[str, float]()
    filtered = isinstance(collection, DynamicSampling)
    max_rounds = collection.max_rounds if filtered else 1
    drawn: list[Completion] = []
    informative = np.zeros(0, bool)
    sampling, rounds = sampling_of(recipe), 0
    # A round is a whole batch; what it has too much is sampled in vain, the price of one program.
    while rounds < max_rounds and informative.sum() < recipe.completions:
        examples = [sampler.task.train(prompts_seen + i) for i in range(recipe.prompts)]
        more = sampler.sample(
            examples,
            sampling,
            recipe.group_size,
            key(rounds),
            first=prompts_seen,
            seconds=seconds,
            entropy=entropy,
        )
        rounds, prompts_seen = rounds + 1, prompts_seen + recipe.prompts
        drawn += more
        found = informative_groups(jnp.asarray(scores_of(more)), jnp.asarray(groups_of(more)))
        informative = np.concatenate([informative, np.asarray(found)])
    # Of everything that was sampled: the verifier's work does not end where groups are dropped.
    reasons = Counter(completion.verdict.reason for completion in drawn)
    metrics = {f"verifier/{reason}": float(reasons[reason]) for reason in REASONS}
    counts = np.ones(recipe.completions, bool)
    completions = drawn
    if filtered:
        # Stable, so groups stay together and come in the order they were drawn.
        order = np.argsort(~informative, kind="stable")[: recipe.completions]
        completions, counts = [drawn[row] for row in order], informative[order]
        generated = rounds * recipe.prompts
        metrics |= {
            "train/num_gen_batches": float(rounds),
            "dynamic_sampling/prompts_generated": float(generated),
            "dynamic_sampling/prompts_kept": int(counts.sum()) / recipe.group_size,
            "dynamic_sampling/filtered": 1
            - int(informative.sum()) // recipe.group_size / generated,
            "dynamic_sampling/gave_up": float(counts.sum() < recipe.completions),
        }
    batch = batch_of([completion.trajectory for completion in completions], counts, mesh)
    # Each points at its row of this batch: what was sampled in vain gives its memory back.
    completions = [completion.at(batch, row) for row, completion in enumerate(completions)]
    return Collected(completions, batch, prompts_seen, metrics, seconds)


def sampling_of(recipe: Recipe) -> Sampling:
    """How the completions that are learned from are drawn."""
    return Sampling(recipe.temperature, recipe.top_k, recipe.top_p, recipe.temperature_rule)


def groups_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` the number of each one's prompt."""
    return np.array([c.trajectory.request.prompt for c in completions], np.int32)


def shown(completions: Sequence[Completion], number: int) -> list[Completion]:
    """Some completions to look at, in their order: two of a prompt as long as there are others."""
    rows = np.arange(len(completions))
    begins = np.diff(groups_of(completions), prepend=-1) != 0
    place = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return [completions[row] for row in sorted(np.argsort(place // 2, kind="stable")[:number])]
