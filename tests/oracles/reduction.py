"""Sums and means of one number per token."""

import math

import numpy as np

from oracles.rows import rows


def aggregate(
    per_token,
    mask,
    mode,
    max_length=None,
    num_tokens=None,
    num_sequences=None,
    empty_rows="skip",
):
    sums, means, tokens = [], [], 0
    for i, times in enumerate(rows(mask)):
        if times:
            total = 0.0
            for t in times:
                total += float(per_token[i][t])
            sums.append(total)
            means.append(total / len(times))
            tokens += len(times)
    if tokens == 0:
        return 0.0
    if num_tokens is None:
        num_tokens = tokens
    if num_sequences is None:
        num_sequences = len(sums) if empty_rows == "skip" else len(mask)
    return {
        "token-mean": math.fsum(sums) / num_tokens,
        "token-sum": math.fsum(sums),
        "seq-mean-token-sum": math.fsum(sums) / num_sequences,
        "seq-mean-token-mean": math.fsum(means) / num_sequences,
        "seq-mean-token-sum-norm": math.fsum(sums) / num_sequences / (max_length or 1),
    }[mode]


def token_weights(mask, mode, max_length=None, **denominators):
    """The factor of each token in an aggregate, found by giving it the only loss."""
    weights = np.zeros(np.shape(mask))
    for i, times in enumerate(rows(mask)):
        for t in times:
            single = np.zeros(np.shape(mask))
            single[i, t] = 1.0
            weights[i, t] = aggregate(single, mask, mode, max_length, **denominators)
    return weights
