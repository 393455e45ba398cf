"""Slow float64 loops that say what each function should compute, sharing no code with the library.

They follow the papers' formulas literally: sequences are first compressed to their true tokens, and
everything is then a loop over Python floats. Masks are read by truth, values under them never.
"""

import math

import numpy as np


def rows(mask):
    """For each row, the positions that are true."""
    return [[t for t, true in enumerate(row) if true] for row in np.asarray(mask)]


def aggregate(per_token, mask, mode, max_length=None):
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
    return {
        "token-mean": sum(sums) / tokens,
        "token-sum": sum(sums),
        "seq-mean-token-sum": sum(sums) / len(sums),
        "seq-mean-token-mean": sum(means) / len(sums),
        "seq-mean-token-sum-norm": sum(sums) / len(sums) / (max_length or 1),
    }[mode]


def gae(rewards, values, mask, gamma, lam, bootstrap=None):
    """Advantages as explicit double sums of temporal-difference errors over compressed rows."""
    shape = np.shape(mask)
    gamma, lam = (np.broadcast_to(np.asarray(x, float), shape) for x in (gamma, lam))
    advantages, returns = np.zeros(shape), np.zeros(shape)
    for i, times in enumerate(rows(mask)):
        state_values = [float(values[i][t]) for t in times]
        state_values.append(0.0 if bootstrap is None else float(bootstrap[i]))
        for start in range(len(times)):
            weight, total = 1.0, 0.0
            for k in range(start, len(times)):
                t = times[k]
                error = float(rewards[i][t]) + gamma[i, t] * state_values[k + 1] - state_values[k]
                total += weight * error
                weight *= gamma[i, t] * lam[i, t]
            advantages[i, times[start]] = total
            returns[i, times[start]] = total + state_values[start]
    return advantages, returns


def grpo(rewards, groups, scale="group", epsilon=1e-6):
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [float(r) for r, g in zip(rewards, groups, strict=True) if g == group]
        if all(member == members[0] for member in members):
            advantages.append(0.0)
            continue
        mean = math.fsum(members) / len(members)
        variance = math.fsum((m - mean) ** 2 for m in members) / (len(members) - 1)
        divisor = math.sqrt(variance) + epsilon if scale == "group" else 1.0
        advantages.append((float(reward) - mean) / divisor)
    return np.array(advantages)


def length_adaptive_lambda(length, alpha, floor):
    return floor if length == 0 else max(1 - 1 / (alpha * length), floor)


def whiten(x, mask, unbiased=True, keep_mean=False, epsilon=1e-8):
    chosen = [float(x[i][t]) for i, times in enumerate(rows(mask)) for t in times]
    out = np.zeros(np.shape(mask))
    if not chosen:
        return out
    mean = math.fsum(chosen) / len(chosen)
    squares = math.fsum((c - mean) ** 2 for c in chosen)
    variance = squares / max(len(chosen) - 1 if unbiased else len(chosen), 1)
    for i, times in enumerate(rows(mask)):
        for t in times:
            scaled = (float(x[i][t]) - mean) / math.sqrt(variance + epsilon)
            out[i, t] = scaled + (mean if keep_mean else 0.0)
    return out


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


def token_weights(mask, mode, max_length=None):
    """The factor of each token in an aggregate, found by giving it the only loss."""
    weights = np.zeros(np.shape(mask))
    for i, times in enumerate(rows(mask)):
        for t in times:
            alone = np.zeros(np.shape(mask))
            alone[i, t] = 1.0
            weights[i, t] = aggregate(alone, mask, mode, max_length)
    return weights


def value_token(value, old_value, target, down=None, up=None):
    """Loss of one token, its derivative by the value, and whether the clip acts."""
    error = 0.5 * (value - target) ** 2
    if down is None:
        return error, value - target, False
    bounded = min(max(value, old_value - down), old_value + up)
    bounded_error = 0.5 * (bounded - target) ** 2
    if bounded_error > error:
        return bounded_error, 0.0, True
    return error, value - target, False


def explained_variance(values, returns, mask):
    pairs = [
        (float(values[i][t]), float(returns[i][t])) for i, ts in enumerate(rows(mask)) for t in ts
    ]
    targets = [g for _, g in pairs]
    errors = [g - v for v, g in pairs]
    if not pairs or max(targets) == min(targets):
        return 0.0

    def variance(xs):
        mean = math.fsum(xs) / len(xs)
        return math.fsum((x - mean) ** 2 for x in xs) / len(xs)

    return 1 - variance(errors) / variance(targets)


def kl_token(log_ratio, kind):
    """Value and derivative of an estimator at one log-ratio."""
    values = {
        "k1": log_ratio,
        "k2": 0.5 * log_ratio * log_ratio,
        "k3": math.exp(-log_ratio) - 1 + log_ratio,
        "abs": abs(log_ratio),
    }
    slopes = {
        "k1": 1.0,
        "k2": log_ratio,
        "k3": 1 - math.exp(-log_ratio),
        "abs": math.copysign(1.0, log_ratio),
    }
    if kind.endswith("+"):
        return values[kind[:-1]], slopes["k2"]
    return values[kind], slopes[kind]


def entropy(logits):
    largest = max(logits)
    weights = [math.exp(z - largest) for z in logits]
    total = math.fsum(weights)
    return -math.fsum(w / total * math.log(w / total) for w in weights if w > 0)


def overlong_penalty(length, max_length, buffer):
    if length <= max_length - buffer:
        return 0.0
    if length > max_length:
        return -1.0
    return (max_length - buffer - length) / buffer


def informative(scores, groups):
    return [
        len({float(s) for s, g in zip(scores, groups, strict=True) if g == group}) > 1
        for group in groups
    ]
