"""Accuracy on held-out prompts: sampled, greedy, pass@k."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from jrl.tasks import Example
from jrl.trainer.collect import Completions, sample
from jrl.trainer.setup import Setup
from moe.weights import Transformer


def heldout_examples(setup: Setup, number: int, unit: int = 1) -> list[Example]:
    """The first held-out prompts: `number` of them, or as many as there are that divide over
    devices.

    Args:
      unit: what they must divide by besides, where they are fewer.

    Raises:
      ValueError: when there are fewer than devices to share them.
    """
    size, ranks = setup.task.heldout_size, math.lcm(setup.rollout_ranks, unit)
    if size is not None and size < number:
        number = size // ranks * ranks
    if number == 0:
        raise ValueError(
            f"task {setup.task.name!r} has {size} held-out prompts, too few for dp x tp = {ranks} "
            f"of layout {str(setup.rollout_mesh.layout)!r}: use fewer devices, or a task with more "
            "prompts."
        )
    return [setup.task.heldout(index) for index in range(number)]


def full_marks(completions: Completions) -> float:
    """The share of completions with full marks."""
    return float(np.mean(completions.scores == 1.0))


def evaluate(
    setup: Setup, weights: Transformer[Array], step: int, examples: Sequence[Example]
) -> dict[str, float]:
    """Held-out metrics of a step: one sampled and one greedy completion per prompt."""
    seconds: dict[str, float] = {}
    key = setup.key("evaluation", step)
    sampled = sample(setup, setup.sampled_decoder, weights, examples, key, seconds)
    greedy = sample(setup, setup.greedy_decoder, weights, examples, key, seconds)
    return {
        "val/accuracy/sampled": full_marks(sampled),
        "val/accuracy/greedy": full_marks(greedy),
        "val/score/sampled": float(np.mean(sampled.scores)),
        "val/score/greedy": float(np.mean(greedy.scores)),
        "val/response_length/mean": float(np.mean(sampled.lengths)),
        "val/response_length/clip_ratio": float(np.mean(sampled.rollout.truncated)),
        "timing_s/testing": sum(seconds.values()),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of `k` samples is correct, without bias.

    ``1 - C(n - c, k) / C(n, k)`` from ``n`` samples of which ``c`` are correct.

    Raises:
      ValueError: when `k` is more than the samples there are.

    References:
      Chen et al., "Evaluating Large Language Models Trained on Code", 2021, eq. 1.
      https://arxiv.org/abs/2107.03374
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} must lie in 1..{num_samples}, the samples per prompt.")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)
