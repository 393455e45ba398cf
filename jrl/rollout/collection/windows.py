"""Partial rollouts (T-PPO): responses sampled in windows, and the unfinished ones between two
steps."""

from typing import Generic, TypeVar

import numpy as np
from flax import struct

from jrl.recipes.base.recipe import Recipe
from jrl.rollout.decoding.requests import NO_TOKENS, Request
from jrl.rollout.sampler import Completion, Sampler
from jrl.rollout.sampling import Sampling

Leaf = TypeVar("Leaf")


@struct.dataclass
class Unfinished(Generic[Leaf]):
    """Unfinished responses that a step continues, in their order; a part of the state of a run.

    Attributes:
      prompts: ``[entry]`` id of the prompt.
      samples: ``[entry]`` sample id, the index of the response to its prompt.
      lengths: ``[entry]`` tokens so far, 0 if it was not started; -1 if the entry is empty.
      tokens: ``[entry, response]`` ids, 0 after those.
    """

    prompts: Leaf
    samples: Leaf
    lengths: Leaf
    tokens: Leaf


def none_unfinished(recipe: Recipe, response_length: int) -> Unfinished[np.ndarray]:
    """No unfinished responses, the state before the first step."""
    # A step's responses, and the rest of a group that did not fit into the step.
    num_entries = recipe.completions + recipe.group_size
    zeros = np.zeros(num_entries, np.int32)
    tokens = np.zeros((num_entries, response_length), np.int32)
    return Unfinished(zeros, zeros.copy(), zeros - 1, tokens)


def sample_windows(
    sampler: Sampler,
    recipe: Recipe,
    window: int,
    sampling: Sampling,
    prompts_seen: int,
    unfinished: Unfinished[np.ndarray],
    seconds: dict[str, float],
) -> tuple[list[Completion], int, Unfinished[np.ndarray]]:
    """Continues the responses of a step for a window: unfinished ones, then fresh ones.

    Returns:
      The responses, of which the unfinished have no verdict; the training prompts used so far; and
      the responses that are unfinished now.
    """
    columns = unfinished.prompts, unfinished.samples, unfinished.lengths, unfinished.tokens
    rows = [
        (int(prompt), int(sample), tokens[:length])
        for prompt, sample, length, tokens in zip(*columns, strict=True)
        if length >= 0
    ]
    while len(rows) < recipe.completions:
        rows += [(prompts_seen, sample, NO_TOKENS) for sample in range(recipe.group_size)]
        prompts_seen += 1
    # A group may be split: the rest of its responses start in the next step that has space.
    now, later = rows[: recipe.completions], rows[recipe.completions :]
    examples = {prompt: sampler.task.train(prompt) for prompt in sorted({row[0] for row in now})}
    ids = {prompt: sampler.encoded(example) for prompt, example in examples.items()}
    # In the first step all responses start together: their windows differ in length, so that about
    # as many responses reach the length limit in each later step.
    stages = -(-sampler.response_length // window) if np.all(unfinished.lengths < 0) else 1
    requests = [
        Request(
            prompt, sample, ids[prompt], sampler.response_length, tokens, window * (1 + n % stages)
        )
        for n, (prompt, sample, tokens) in enumerate(now)
    ]
    completions = sampler.decode(requests, examples, sampling, seconds=seconds).wait()
    # Neither log-probabilities nor KV cache: the next step trains on its own tokens only, and
    # recomputes the rest.
    trajectories = [each.trajectory for each in completions if each.trajectory.finish == "window"]
    continued = [(t.request.prompt, t.request.sample, t.response) for t in trajectories]
    continued.sort(key=lambda row: row[:2])
    unfinished = none_unfinished(recipe, sampler.response_length)
    for entry, (prompt, sample, tokens) in enumerate([*continued, *later]):
        unfinished.prompts[entry], unfinished.samples[entry] = prompt, sample
        unfinished.lengths[entry] = len(tokens)
        unfinished.tokens[entry, : len(tokens)] = tokens
    return completions, prompts_seen, unfinished
