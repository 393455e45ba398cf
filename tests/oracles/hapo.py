"""HAPO token by token, with the derivatives of its loss."""

import math

import numpy as np

from oracles.policy import ppo_token
from oracles.rows import rows


def entropy_statistics(entropy, mask, quantile=0.8):
    """Pivot, scale and the extremes of the standardised entropy."""
    logs = [
        math.log(max(float(entropy[i][t]), 1e-8)) for i, ts in enumerate(rows(mask)) for t in ts
    ]
    if not logs:
        return 0.0, 0.0, 0.0, 0.0
    pivot = sorted(logs)[round(quantile * (len(logs) - 1))]
    scale = math.sqrt(math.fsum((x - pivot) ** 2 for x in logs) / len(logs))
    if scale == 0:
        return pivot, 0.0, 0.0, 0.0
    return pivot, scale, (max(logs) - pivot) / scale, (min(logs) - pivot) / scale


def standardized_entropy(entropy, mask, quantile=0.8):
    pivot, scale, _, _ = entropy_statistics(entropy, mask, quantile)
    h = np.zeros(np.shape(mask))
    for i, times in enumerate(rows(mask)):
        for t in times:
            log_entropy = math.log(max(float(entropy[i][t]), 1e-8))
            h[i, t] = (log_entropy - pivot) / scale if scale else 0.0
    return h


def entropy_signal(entropy, mask, quantile=0.8, sign="intended"):
    _, _, h_max, h_min = entropy_statistics(entropy, mask, quantile)
    signal = standardized_entropy(entropy, mask, quantile)
    for i, times in enumerate(rows(mask)):
        for t in times:
            if signal[i, t] > 0:
                signal[i, t] /= h_max
            elif signal[i, t] < 0:
                signal[i, t] /= abs(h_min) if sign == "intended" else h_min
    return signal


def adaptive_temperature(signal, base=1.0, strength=0.05, max_signal=1.0):
    if max_signal is not None:
        signal = min(max(signal, -max_signal), max_signal)
    return base * (1 + strength * signal)


def asymmetric_clip_bounds(signal, clip_low=0.2, clip_high=0.28, strength=1.0):
    """The two bounds of one token."""
    if signal > 0:
        return clip_low, clip_high * (1 + strength * signal)
    return clip_low * (1 - strength * signal), clip_high


def redistributed_advantage(ratio, advantage, signal, clip_low=0.2, clip_high=0.28, strength=1.0):
    """The advantage of one token."""
    bottom, top = 1 - clip_low / 2, 1 + clip_high / 2
    inside, outside = bottom < ratio < top, ratio < bottom or ratio > top
    acts = outside if signal > 0 else inside
    return advantage * (1 + strength * signal) if acts else advantage


def hapo(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    signal,
    clip_low=0.2,
    clip_high=0.28,
    clip_strength=1.0,
    redistribution=1.0,
    clip_dual=10.0,
):
    """Per-token losses, their derivatives and which bound acts, 0 and "" under the mask."""
    shape = np.shape(mask)
    losses, slopes, acts = np.zeros(shape), np.zeros(shape), np.full(shape, "", dtype=object)
    for i, times in enumerate(rows(mask)):
        for t in times:
            log_ratio = float(logprobs[i][t]) - float(old_logprobs[i][t])
            h = float(signal[i][t])
            low, high = asymmetric_clip_bounds(h, clip_low, clip_high, clip_strength)
            advantage = redistributed_advantage(
                math.exp(log_ratio), float(advantages[i][t]), h, low, high, redistribution
            )
            losses[i, t], slopes[i, t], acts[i, t] = ppo_token(
                log_ratio, advantage, low, high, clip_dual
            )
    return losses, slopes, acts
