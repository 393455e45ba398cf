"""Policy losses token by token, with their derivatives."""

import math

import numpy as np

from oracles.rows import rows


def ppo_token(log_ratio, advantage, clip_low, clip_high, clip_dual=None):
    """Loss of one token, its derivative by the log-probability, and which bound acts."""
    ratio = math.exp(log_ratio)
    loss, slope, acts = -advantage * ratio, -advantage * ratio, ""
    if advantage > 0 and ratio > 1 + clip_high:
        loss, slope, acts = -advantage * (1 + clip_high), 0.0, "clip"
    elif advantage < 0 and ratio < 1 - clip_low:
        loss, slope, acts = -advantage * (1 - clip_low), 0.0, "clip"
    elif advantage < 0 and clip_dual is not None and ratio > clip_dual:
        loss, slope, acts = -advantage * clip_dual, 0.0, "dual"
    return loss, slope, acts


def ppo(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, clip_dual=None):
    """Per-token losses, their derivatives and which bound acts, 0 and "" under the mask."""
    shape = np.shape(mask)
    losses, slopes, acts = np.zeros(shape), np.zeros(shape), np.full(shape, "", dtype=object)
    for i, times in enumerate(rows(mask)):
        for t in times:
            log_ratio = float(logprobs[i][t]) - float(old_logprobs[i][t])
            losses[i, t], slopes[i, t], acts[i, t] = ppo_token(
                log_ratio, float(advantages[i][t]), clip_low, clip_high, clip_dual
            )
    return losses, slopes, acts
