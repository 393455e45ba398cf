"""A policy measured on held-out prompts: several completions of each, and its likeliest one."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array

from jrl.rollout.generate import Decoder
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.tasks import REASONS, Example, Verdict
from jrl.trainer.collect import sample
from jrl.trainer.evaluation import heldout_examples, pass_at_k
from jrl.trainer.setup import Setup
from moe.weights import Transformer

ROWS_AT_ONCE = 2048
"""Completions decoded in one call, about; it bounds the memory of the cache."""


def measure(
    setup: Setup,
    weights: Transformer[Array],
    sampling: Sampling,
    *,
    num_prompts: int,
    k: int,
    seed: int,
) -> dict[str, float | int]:
    """Accuracies, pass@k, lengths and the verifier's reasons.

    Args:
      sampling: how the `k` completions of a prompt are drawn.
      num_prompts: held-out prompts, or all there are if they are fewer.
      k: completions per prompt; pass@k is given for 1, 2, 4, ... and `k`.
      seed: of sampling.

    Returns:
      Numbers by name; those of length and of the verifier are about the sampled completions.
    """
    examples = heldout_examples(setup, num_prompts)
    key = jax.random.key(seed)
    decoder = setup.decoder(sampling, k)
    verdicts, lengths, truncated = _complete(setup, decoder, weights, examples, key)
    greedy, _, _ = _complete(setup, setup.decoder(GREEDY, 1), weights, examples, key)
    scores = np.array([verdict.score for verdict in verdicts])
    best = np.array([verdict.score for verdict in greedy])
    correct = (scores == 1.0).reshape(-1, k).sum(axis=1)
    reasons = Counter(verdict.reason for verdict in verdicts)
    results = {
        "prompts": len(examples),
        "accuracy/sampled": (scores == 1.0).mean(),
        # Prompts are what was drawn at random: completions of one prompt are not independent.
        "accuracy/sampled/standard_error": (correct / k).std() / math.sqrt(len(examples)),
        "accuracy/greedy": (best == 1.0).mean(),
        "score/sampled": scores.mean(),
        "score/greedy": best.mean(),
        **{f"pass@{n}": np.mean([pass_at_k(k, int(c), n) for c in correct]) for n in _up_to(k)},
        "response_length/mean": lengths.mean(),
        "response_length/clip_ratio": truncated.mean(),
        **{f"verifier/{reason}": reasons[reason] for reason in REASONS},
    }
    return {name: np.asarray(value).item() for name, value in results.items()}


def _complete(
    setup: Setup,
    decoder: Decoder,
    weights: Transformer[Array],
    examples: Sequence[Example],
    key: Array,
) -> tuple[list[Verdict], np.ndarray, np.ndarray]:
    """Verdict, length and truncation of each completion, decoded in batches of one size.

    The last batch is filled up with the first examples again, whose completions do not count.
    """
    unit = setup.rollout_ranks
    size = min(len(examples), max(1, ROWS_AT_ONCE // decoder.copies))
    size = -(-size // unit) * unit
    verdicts: list[Verdict] = []
    lengths, truncated = [], []
    for number, start in enumerate(range(0, len(examples), size)):
        batch = [examples[index % len(examples)] for index in range(start, start + size)]
        drawn = sample(setup, decoder, weights, batch, jax.random.fold_in(key, number))
        verdicts += drawn.verdicts
        lengths.append(drawn.lengths)
        truncated.append(drawn.rollout.truncated)
    count = len(examples) * decoder.copies
    return verdicts[:count], np.concatenate(lengths)[:count], np.concatenate(truncated)[:count]


def _up_to(k: int) -> Iterator[int]:
    """1, 2, 4, ... and `k` itself."""
    power = 1
    while power < k:
        yield power
        power *= 2
    yield k
