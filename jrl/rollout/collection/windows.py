"""Partial rollouts (T-PPO): responses sampled in windows, and the unfinished ones between two
steps."""

from typing import Any

import numpy as np

from jrl.recipes.base.recipe import Recipe, Unfinished
from jrl.rollout.decoding.requests import NO_TOKENS, Request
from jrl.rollout.sampler import Completion, Sampler
from jrl.rollout.sampling import Sampling


def sample_windows(
    sampler: Sampler,
    recipe: Recipe,
    window: int,
    sampling: Sampling,
    prompts_seen: int,
    state: dict[str, Any],
    seconds: dict[str, float],
) -> tuple[list[Completion], int, dict[str, Any]]:
    """Continues the responses of a step for a window: unfinished ones, then fresh ones.

    Args:
      state: of the algorithm, on the host, with the responses to continue.

    Returns:
      The responses, of which the unfinished have no verdict; the training prompts used so far; and
      the part of the state that changed.
    """
    unfinished: Unfinished[np.ndarray] = state["unfinished"]
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
    unfinished = Unfinished.none(len(unfinished.lengths), sampler.response_length)
    for entry, (prompt, sample, tokens) in enumerate([*continued, *later]):
        unfinished.prompts[entry], unfinished.samples[entry] = prompt, sample
        unfinished.lengths[entry] = len(tokens)
        unfinished.tokens[entry, : len(tokens)] = tokens
    return completions, prompts_seen, {"unfinished": unfinished}
