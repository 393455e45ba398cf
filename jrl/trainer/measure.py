"""A policy measured on held-out prompts: several completions of each, and its likeliest one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array

from jrl.losses import pass_at_k
from jrl.rollout.generate import Decoder
from jrl.rollout.sampling import GREEDY, Sampling
from jrl.tasks import REASONS, Example, Verdict
from jrl.trainer.collect import Completions, Unverified, decode
from jrl.trainer.evaluation import filled_up, heldout_examples
from jrl.trainer.setup import Setup
from moe.weights import Transformer

ROWS_AT_ONCE = 2048
"""Completions decoded in one call, about; it bounds the memory of the cache."""

Report = Callable[[str, int, int], None]
"""What is told how far an evaluation is: the phase, how much of it is done, and of how much."""


def measure(
    setup: Setup,
    weights: Transformer[Array],
    sampling: Sampling,
    *,
    num_prompts: int,
    k: int,
    seed: int,
    report: Report = lambda phase, done, total: None,
) -> dict[str, float | int]:
    """Accuracies, pass@k, lengths and the verifier's reasons.

    Args:
      sampling: how the `k` completions of a prompt are drawn.
      num_prompts: held-out prompts, or all there are if they are fewer.
      k: completions per prompt; pass@k is given for 1, 2, 4, ... and `k`.
      seed: of sampling.
      report: called with "sampled" or "greedy", the completions done and all there will be.

    Returns:
      Numbers by name; those of length and of the verifier are about the sampled completions.
    """
    examples = heldout_examples(setup, num_prompts)
    key = jax.random.key(seed)
    decoder = setup.decoder(sampling, k)
    verdicts, lengths, truncated = _complete(
        setup, decoder, weights, examples, key, partial(report, "sampled")
    )
    greedy, _, _ = _complete(
        setup, setup.decoder(GREEDY, 1), weights, examples, key, partial(report, "greedy")
    )
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
        **{
            f"pass@{n}": np.mean([float(pass_at_k(k, int(c), n)) for c in correct])
            for n in _up_to(k)
        },
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
    report: Callable[[int, int], None],
) -> tuple[list[Verdict], np.ndarray, np.ndarray]:
    """Verdict, length and truncation of each completion, decoded in batches of one size.

    The last batch is filled up with the first examples again, whose completions do not count.
    """
    unit = setup.rollout_ranks
    size = min(len(examples), max(1, ROWS_AT_ONCE // decoder.copies))
    size = -(-size // unit) * unit
    count = len(examples) * decoder.copies
    done: list[Completions] = []

    def finish(drawn: Unverified) -> None:
        done.append(drawn.verified())
        report(min(sum(len(batch.texts) for batch in done), count), count)

    report(0, count)
    batches = filled_up(examples, size)
    waiting: Unverified | None = None
    for number, start in enumerate(range(0, len(batches), size)):
        batch, own_key = batches[start : start + size], jax.random.fold_in(key, number)
        drawn = decode(setup, decoder, weights, batch, own_key)
        # A batch is verified while the next is decoded.
        if waiting is not None:
            finish(waiting)
        waiting = drawn
    if waiting is not None:
        finish(waiting)
    verdicts = [verdict for batch in done for verdict in batch.verdicts]
    lengths = np.concatenate([batch.lengths for batch in done])
    truncated = np.concatenate([batch.rollout.truncated for batch in done])
    return verdicts[:count], lengths[:count], truncated[:count]


def _up_to(k: int) -> Iterator[int]:
    """1, 2, 4, ... and `k` itself."""
    power = 1
    while power < k:
        yield power
        power *= 2
    yield k
