"""DPPO, covariances and masks of tokens, token by token."""

import math

import numpy as np

from oracles.policy import ppo_token
from oracles.rows import rows


def dppo_token(logprob, old, advantage, kind, max_divergence, max_ratio=20.0):
    """Loss of one token, its derivative by the log-probability, and what acts on it.

    A bound may be two, for tokens that fall and for those that rise.
    """
    down, up = np.broadcast_to(max_divergence, 2)
    p, q = math.exp(logprob), math.exp(old)
    if kind == "tv":
        keeps = p - q <= up if advantage > 0 else p - q >= -down
    else:
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        toward = p <= q if advantage > 0 else p >= q
        keeps = kl <= (up if advantage > 0 else down) or toward
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


def covariances(logprobs, advantages, mask):
    places = [(i, t) for i, times in enumerate(rows(mask)) for t in times]
    out = np.zeros(np.shape(mask))
    if places:
        mean_a = math.fsum(float(advantages[i][t]) for i, t in places) / len(places)
        mean_l = math.fsum(float(logprobs[i][t]) for i, t in places) / len(places)
        for i, t in places:
            out[i, t] = (float(advantages[i][t]) - mean_a) * (float(logprobs[i][t]) - mean_l)
    return out


def clip_cov(logprobs, old, advantages, mask, low=1.0, high=5.0, clip_low=1.0, clip_high=1.0):
    """Per-token losses, derivatives and what acts, with every token in the range chosen."""
    shape = np.shape(mask)
    losses, slopes, acts = np.zeros(shape), np.zeros(shape), np.full(shape, "", dtype=object)
    covariance = covariances(logprobs, advantages, mask)
    for i, times in enumerate(rows(mask)):
        for t in times:
            log_ratio = float(logprobs[i][t]) - float(old[i][t])
            loss, slope, act = ppo_token(log_ratio, float(advantages[i][t]), clip_low, clip_high)
            if not act and low < covariance[i, t] < high:
                loss, slope, act = 0.0, 0.0, "cov"
            losses[i, t], slopes[i, t], acts[i, t] = loss, slope, act
    return losses, slopes, acts


def kl_cov(logprobs, old, advantages, mask, fraction=2e-3, coefficient=1.0):
    """Per-token losses, derivatives and what acts; the fraction is exact to a millionth."""
    shape = np.shape(mask)
    losses, slopes, acts = np.zeros(shape), np.zeros(shape), np.full(shape, "", dtype=object)
    covariance = covariances(logprobs, advantages, mask)
    places = [(i, t) for i, times in enumerate(rows(mask)) for t in times]
    count = max(1, math.floor(fraction * len(places) + 1e-6)) if fraction else 0
    ranked = sorted(places, key=lambda place: -covariance[place])
    for i, t in places:
        log_ratio = float(logprobs[i][t]) - float(old[i][t])
        losses[i, t] = slopes[i, t] = -float(advantages[i][t]) * math.exp(log_ratio)
        if (i, t) in ranked[:count]:
            losses[i, t] += coefficient * abs(log_ratio)
            slopes[i, t] += coefficient * ((log_ratio > 0) - (log_ratio < 0))
            acts[i, t] = "cov"
    return losses, slopes, acts


def top_entropy_mask(entropy, mask, fraction=0.2, threshold=None):
    values = sorted(float(entropy[i][t]) for i, times in enumerate(rows(mask)) for t in times)
    out = np.zeros(np.shape(mask), bool)
    if not values:
        return out
    if threshold is None:
        kept = math.floor(fraction * (len(values) - 1) + 1e-6) + 1
        threshold = values[-kept]
    for i, times in enumerate(rows(mask)):
        for t in times:
            out[i, t] = float(entropy[i][t]) >= threshold
    return out


def off_policy_sequence_mask(logprobs, behaviour_logprobs, advantages, mask, max_divergence):
    out = np.zeros(np.shape(mask), bool)
    for i, times in enumerate(rows(mask)):
        gaps = [float(behaviour_logprobs[i][t]) - float(logprobs[i][t]) for t in times]
        far = bool(gaps) and math.fsum(gaps) / len(gaps) > max_divergence
        for t in times:
            advantage = float(advantages[i][t] if len(advantages[i]) > 1 else advantages[i][0])
            out[i, t] = not (advantage < 0 and far)
    return out
