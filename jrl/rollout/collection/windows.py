"""Responses that are written in windows, and those that are under way between two steps."""

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
    """Responses that a step goes on with, in their order; a part of the state of a run.

    Attributes:
      prompts: ``[place]`` number of the prompt.
      samples: ``[place]`` which of its responses it is.
      lengths: ``[place]`` tokens so far, 0 where it was not begun; -1 where the place is empty.
      tokens: ``[place, response]`` ids, 0 after those.
    """

    prompts: Leaf
    samples: Leaf
    lengths: Leaf
    tokens: Leaf


def none_unfinished(recipe: Recipe, response_length: int) -> Unfinished[np.ndarray]:
    """Before the first step."""
    # A step's responses, and those of a group of which the step had no room for all.
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
    """Writes as many responses on as a step has: those under way, then fresh ones.

    Returns:
      The responses, of which the unfinished have no verdict; the training prompts drawn so far; and
      what is under way now.
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
    # A group may be cut: the rest of its responses begin in the next step that has room for them.
    now, later = asked[: recipe.completions], asked[recipe.completions :]
    examples = {prompt: sampler.task.train(prompt) for prompt in sorted({row[0] for row in now})}
    ids = {prompt: sampler.encoded(example) for prompt, example in examples.items()}
    # In the first step, where all begin at once, some are written on further than others, so that
    # about as many come to their end in each step after it.
    stages = -(-sampler.response_length // window) if np.all(unfinished.lengths < 0) else 1
    requests = [
        Request(
            prompt, sample, ids[prompt], sampler.response_length, tokens, window * (1 + n % stages)
        )
        for n, (prompt, sample, tokens) in enumerate(now)
    ]
    written = sampler.decode(requests, examples, sampling, seconds=seconds).verified()
    # Neither log-probabilities nor keys and values: the next step learns from its own tokens alone,
    # and runs the rest again.
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
