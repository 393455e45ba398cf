"""Accuracy on held-out prompts: sampled and greedy."""

import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from jrl.tasks import Example
from jrl.trainer.collect import Completions, decode
from jrl.trainer.setup import Setup
from moe.weights import Transformer


def heldout_examples(setup: Setup, number: int) -> list[Example]:
    """The first held-out prompts: `number` of them, or all there are if they are fewer."""
    size = setup.task.heldout_size
    number = number if size is None else min(number, size)
    return [setup.task.heldout(index) for index in range(number)]


def filled_up(examples: Sequence[Example], unit: int) -> list[Example]:
    """The examples, and the first of them again up to a multiple of `unit`: what divides over
    devices. What is added does not count."""
    return [examples[index % len(examples)] for index in range(-(-len(examples) // unit) * unit)]


def full_marks(completions: Completions) -> float:
    """The share of completions with full marks."""
    return float(np.mean(completions.scores == 1.0))


def evaluate(
    setup: Setup, weights: Transformer[Array], step: int, examples: Sequence[Example]
) -> dict[str, float]:
    """Held-out metrics of a step: one sampled and one greedy completion per prompt."""
    begin = time.perf_counter()
    key = setup.key("evaluation", step)
    batch = filled_up(examples, setup.rollout_ranks)
    # The sampled completions are verified while the greedy ones are decoded.
    both = [
        decode(setup, decoder, weights, batch, key)
        for decoder in (setup.sampled_decoder, setup.greedy_decoder)
    ]
    rows = np.arange(len(examples))
    sampled, greedy = (drawn.verified().take(rows) for drawn in both)
    return {
        "val/accuracy/sampled": full_marks(sampled),
        "val/accuracy/greedy": full_marks(greedy),
        "val/score/sampled": float(np.mean(sampled.scores)),
        "val/score/greedy": float(np.mean(greedy.scores)),
        "val/response_length/mean": float(np.mean(sampled.lengths)),
        "val/response_length/clip_ratio": float(np.mean(sampled.rollout.truncated)),
        "timing_s/testing": time.perf_counter() - begin,
    }
