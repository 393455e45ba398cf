"""Evaluation on held-out prompts during training: sampled and greedy accuracy."""

import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from jrl.rollout.completion_metrics import (
    conversation_metrics,
    reward_means,
    task_metrics,
)
from jrl.rollout.sampler import Sampler, accuracy, lengths_of, numbered_heldout, scores_of
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.tasks import Example, Task


def heldout_examples(task: Task, number: int) -> list[Example]:
    """First held-out prompts: `number` of them, or all there are if they are fewer."""
    size = task.heldout_size
    number = number if size is None else min(number, size)
    return [task.heldout(index) for index in range(number)]


Row = TypeVar("Row")


def pad_with_repeats(examples: Sequence[Row], unit: int) -> list[Row]:
    """Pads the examples to a multiple of `unit` with repetitions, so that they divide over devices.
    The caller has to ignore the padding."""
    return [examples[index % len(examples)] for index in range(-(-len(examples) // unit) * unit)]


def heldout_metrics(
    sampler: Sampler, sampling: Sampling, examples: Sequence[Example]
) -> dict[str, float]:
    """Metrics of one sampled and one greedy completion per prompt, of the loaded policy."""
    begin = time.perf_counter()
    # RNG keys depend on the prompt ids: every evaluation of a run uses the same keys (common random
    # numbers), so that two of them are paired.
    prompts = numbered_heldout(examples)
    requests = sampler.requests(prompts, 1)
    # The sampled completions are verified while the greedy ones are decoded.
    decodings = [
        sampler.decode(requests, prompts, sampling_mode) for sampling_mode in (sampling, GREEDY)
    ]
    sampled, greedy = (decoding.wait() for decoding in decodings)
    detail = (
        reward_means(sampled) | task_metrics(sampled, "sampled") | task_metrics(greedy, "greedy")
    )
    detail |= conversation_metrics(sampled)
    return {
        **{f"val/{name}": value for name, value in detail.items()},
        "val/accuracy/sampled": accuracy(sampled),
        "val/accuracy/greedy": accuracy(greedy),
        "val/score/sampled": float(np.mean(scores_of(sampled))),
        "val/score/greedy": float(np.mean(scores_of(greedy))),
        "val/response_length/mean": float(np.mean(lengths_of(sampled))),
        "val/response_length/clip_ratio": float(np.mean([c.truncated for c in sampled])),
        "timing_s/testing": time.perf_counter() - begin,
    }
