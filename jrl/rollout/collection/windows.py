"""Partial rollouts (T-PPO): responses sampled in windows, and the unfinished ones between two
steps."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import jax
import numpy as np
from flax import struct

from jrl.recipes.base.recipe import Recipe
from jrl.rollout.decoding.requests import NOTHING, Request
from jrl.rollout.sampler import Completion, Sampler
from jrl.rollout.sampling import Sampling

Leaf = TypeVar("Leaf")


@struct.dataclass
class Unfinished(Generic[Leaf]):
    """Unfinished responses that a step continues, in their order; a part of the state of a run.

    Attributes:
      prompts: ``[place]`` id of the prompt.
      samples: ``[place]`` sample id, the index of the response to its prompt.
      lengths: ``[place]`` tokens so far, 0 where it was not started; -1 where the entry is empty.
      tokens: ``[place, response]`` ids, 0 after those.
    """

    prompts: Leaf
    samples: Leaf
    lengths: Leaf
    tokens: Leaf


def none_unfinished(recipe: Recipe, response_length: int) -> Unfinished[np.ndarray]:
    """Initial state, before the first step."""
    # A step's responses, and the rest of a group that did not fit into the step.
    places = recipe.completions + recipe.group_size
    nothing = np.zeros(places, np.int32)
    tokens = np.zeros((places, response_length), np.int32)
    return Unfinished(nothing, nothing.copy(), nothing - 1, tokens)


def write_windows(
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
    asked: list[tuple[int, int, np.ndarray]] = [
        (int(prompt), int(sample), tokens[:length])
        for prompt, sample, length, tokens in zip(
            unfinished.prompts,
            unfinished.samples,
            unfinished.lengths,
            unfinished.tokens,
            strict=True,
        )
        if length >= 0
    ]
    while len(asked) < recipe.completions:
        asked += [(prompts_seen, sample, NOTHING) for sample in range(recipe.group_size)]
        prompts_seen += 1
    # A group may be split: the rest of its responses start in the next step that has space.
    now, later = asked[: recipe.completions], asked[recipe.completions :]
    examples = {prompt: sampler.task.train(prompt) for prompt in sorted({row[0] for row in now})}
    ids = {prompt: sampler.encoded(example) for prompt, example in examples.items()}
    # In the first step, where all start together, windows differ in length, so that about as many
    # responses reach the length limit in each later step.
    stages = -(-sampler.response_length // window) if np.all(unfinished.lengths < 0) else 1
    requests = [
        Request(
            prompt, sample, ids[prompt], sampler.response_length, tokens, window * (1 + n % stages)
        )
        for n, (prompt, sample, tokens) in enumerate(now)
    ]
    written = sampler.decode(requests, examples, sampling, seconds=seconds).verified()
    # Neither log-probabilities nor KV cache: the next step trains on its own tokens only, and
    # recomputes the rest.
    going_on = [
        (completion.trajectory.request.prompt, completion.trajectory.request.sample, tokens)
        for completion in written
        if completion.trajectory.finish == "window"
        for tokens in [completion.trajectory.response]
    ]
    going_on.sort(key=lambda row: row[:2])
    return written, prompts_seen, _stored([*going_on, *later], unfinished)


def _stored(
    rows: Sequence[tuple[int, int, np.ndarray]], like: Unfinished[np.ndarray]
) -> Unfinished[np.ndarray]:
    stored = jax.tree.map(np.zeros_like, like)
    stored.lengths[:] = -1
    for place, (prompt, sample, tokens) in enumerate(rows):
        stored.prompts[place], stored.samples[place] = prompt, sample
        stored.lengths[place] = len(tokens)
        stored.tokens[place, : len(tokens)] = tokens
    return stored
