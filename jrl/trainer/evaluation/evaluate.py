"""A policy evaluated on held-out prompts: several completions of each, and its likeliest one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array

from jrl.losses import pass_at_k
from jrl.rollout.engine import ranks
from jrl.rollout.sampler import Completion, Sampler, Unverified, lengths_of
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.tasks import REASONS, Example
from jrl.trainer.evaluation.heldout import filled_up, heldout_examples

ROWS_AT_ONCE = 2048
"""Completions decoded in one call, about; it bounds the memory of the cache."""

Report = Callable[[str, int, int], None]
"""What is told how far an evaluation is: the phase, how much of it is done, and of how much."""


def evaluate(
    sampler: Sampler,
    sampling: Sampling,
    *,
    num_prompts: int,
    k: int,
    seed: int,
    report: Report = lambda phase, done, total: None,
) -> dict[str, float | int]:
    """Accuracies, pass@k, lengths and the verifier's reasons.

    Args:
      sampler: with the policy loaded.
      sampling: how the `k` completions of a prompt are drawn.
      num_prompts: held-out prompts, or all there are if they are fewer.
      k: completions per prompt; pass@k is given for 1, 2, 4, ... and `k`.
      seed: of sampling.
      report: called with "sampled" or "greedy", the completions done and all there will be.

    Returns:
      Numbers by name; those of length and of the verifier are about the sampled completions.
    """
    examples = heldout_examples(sampler.task, num_prompts)
    key = jax.random.key(seed)
    sampled = _complete(sampler, sampling, k, examples, key, partial(report, "sampled"))
    greedy = _complete(sampler, GREEDY, 1, examples, key, partial(report, "greedy"))
    # In float64: these are averaged and printed, and enter no loss.
    scores = np.array([completion.verdict.score for completion in sampled])
    best = np.array([completion.verdict.score for completion in greedy])
    correct = (scores == 1.0).reshape(-1, k).sum(axis=1)
    counts: list[int] = correct.tolist()
    reasons = Counter(completion.verdict.reason for completion in sampled)
    results = {
        "prompts": len(examples),
        "accuracy/sampled": (scores == 1.0).mean(),
        # Prompts are what was drawn at random: completions of one prompt are not independent.
        "accuracy/sampled/standard_error": (correct / k).std() / math.sqrt(len(examples)),
        "accuracy/greedy": (best == 1.0).mean(),
        "score/sampled": scores.mean(),
        "score/greedy": best.mean(),
        **{f"pass@{n}": np.mean([float(pass_at_k(k, c, n)) for c in counts]) for n in _up_to(k)},
        "response_length/mean": lengths_of(sampled).mean(),
        "response_length/clip_ratio": np.mean([completion.truncated for completion in sampled]),
        **{f"verifier/{reason}": reasons[reason] for reason in REASONS},
    }
    return {name: np.asarray(value).item() for name, value in results.items()}


def _complete(
    sampler: Sampler,
    sampling: Sampling,
    k: int,
    examples: Sequence[Example],
    key: Array,
    report: Callable[[int, int], None],
) -> list[Completion]:
    """`k` completions of each example, decoded in batches of one size.

    The last batch is filled up with the first examples again, whose completions do not count.
    """
    unit = ranks(sampler.engine.mesh)
    size = min(len(examples), max(1, ROWS_AT_ONCE // k))
    size = -(-size // unit) * unit
    count = len(examples) * k
    done: list[Completion] = []

    def finish(drawn: Unverified) -> None:
        done.extend(drawn.verified())
        report(min(len(done), count), count)

    report(0, count)
    batches = filled_up(examples, size)
    waiting: Unverified | None = None
    for number, start in enumerate(range(0, len(batches), size)):
        batch, own_key = batches[start : start + size], jax.random.fold_in(key, number)
        drawn = sampler.decode(batch, sampling, k, own_key, first=start)
        # A batch is verified while the next is decoded.
        if waiting is not None:
            finish(waiting)
        waiting = drawn
    if waiting is not None:
        finish(waiting)
    return done[:count]


def _up_to(k: int) -> Iterator[int]:
    """1, 2, 4, ... and `k` itself."""
    power = 1
    while power < k:
        yield power
        power *= 2
    yield k
