"""DPPO, covariances and masks of tokens, token by token."""

import math

import numpy as np

from oracles.rows import rows


def dppo_token(logprob, old, advantage, kind, max_divergence, max_ratio=20.0):
    """Loss of one token, its derivative by the log-probability, and what acts on it."""
    p, q = math.exp(logprob), math.exp(old)
    if kind == "tv":
        keeps = p - q <= max_divergence if advantage > 0 else p - q >= -max_divergence
    else:
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        toward = p <= q if advantage > 0 else p >= q
        keeps = kl <= max_divergence or toward
    if not keeps:
        return 0.0, 0.0, "clip"
    ratio = p / q
    weight = ratio if max_ratio is None else min(ratio, max_ratio)
    return -advantage * weight * logprob, -advantage * weight, "dual" if weight < ratio else ""


def dppo(logprobs, old_logprobs, advantages, mask, **settings):
    """Per-token losses, their derivatives and what acts, 0 and "" under the mask."""
    shape = np.shape(mask)
    losses, slopes, acts = np.zeros(shape), np.zeros(shape), np.full(shape, "", dtype=object)
    for i, times in enumerate(rows(mask)):
        for t in times:
            token = (float(x[i][t]) for x in (logprobs, old_logprobs, advantages))
            losses[i, t], slopes[i, t], acts[i, t] = dppo_token(*token, **settings)
    return losses, slopes, acts
