"""Advantage estimators as loops over compressed rows."""

import math

import numpy as np

from oracles.rows import rows


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
