"""Advantage estimators as loops over compressed rows."""

import itertools
import math

import numpy as np

from oracles.rows import rows


def gae(rewards, values, mask, gamma, lam, bootstrap=None, terminated=None):
    """Advantages as explicit double sums of temporal-difference errors over compressed rows."""
    shape = np.shape(mask)
    gamma, lam = (np.broadcast_to(np.asarray(x, float), shape) for x in (gamma, lam))
    advantages, returns = np.zeros(shape), np.zeros(shape)
    for i, times in enumerate(rows(mask)):
        state_values = [float(values[i][t]) for t in times]
        ended = bootstrap is None or (terminated is not None and terminated[i])
        state_values.append(0.0 if ended else float(bootstrap[i]))
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


def extended_gae(
    rewards, values, mask, truncated, gamma=1.0, lam=0.95, bootstrap_value=None, ignore_last=0
):
    """Advantages, returns and the mask that is left, each row cut or ended by its flag."""
    shape = np.shape(mask)
    after = np.zeros(shape[0])
    for i, times in enumerate(rows(mask)):
        if truncated[i] and bootstrap_value is not None:
            after[i] = float(bootstrap_value[i])
        elif truncated[i] and times:
            after[i] = float(values[i][times[-1]])
    advantages, returns = gae(rewards, values, mask, gamma, lam, after)
    kept = np.zeros(shape, bool)
    for i, times in enumerate(rows(mask)):
        for place, t in enumerate(times):
            kept[i, t] = not truncated[i] or place < len(times) - ignore_last
            if not kept[i, t]:
                advantages[i, t] = 0.0
    return advantages, returns, kept


def _groups(groups):
    """The rows of each group."""
    members = {}
    for row, group in enumerate(groups):
        members.setdefault(int(group), []).append(row)
    return list(members.values())


def _mean(x):
    return math.fsum(x) / len(x)


def _deviation(x, unbiased=True):
    """0 for equal numbers, without rounding, and for a single one."""
    if all(value == x[0] for value in x):
        return 0.0
    mean = _mean(x)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in x) / (len(x) - (1 if unbiased else 0)))


def grpo(rewards, groups, scale="group", epsilon=1e-6, unbiased=True, singleton="zero"):
    out = np.zeros(len(rewards))
    everything = [float(r) for r in rewards]
    for members in _groups(groups):
        chosen = [everything[i] for i in members]
        mean, deviation = _mean(chosen), _deviation(chosen, unbiased)
        if len(members) == 1 and singleton == "reward":
            mean, deviation = 0.0, 1.0
        elif all(c == chosen[0] for c in chosen):
            mean = chosen[0]
        divisor = {
            "group": deviation + epsilon,
            "batch": _deviation(everything, unbiased) + epsilon,
            None: 1.0,
        }[scale]
        for i in members:
            out[i] = 0.0 if everything[i] == mean else (everything[i] - mean) / divisor
    return out


def rloo(rewards, groups):
    out = np.zeros(len(rewards))
    for members in _groups(groups):
        for i in members:
            others = [float(rewards[j]) for j in members if j != i]
            out[i] = float(rewards[i]) - _mean(others) if others else 0.0
    return out


def maxrl(rewards, groups):
    out = np.zeros(len(rewards))
    for members in _groups(groups):
        mean = _mean([float(rewards[i]) for i in members])
        for i in members:
            out[i] = (float(rewards[i]) - mean) / mean if mean else 0.0
    return out


def opo(rewards, groups, lengths):
    out = np.zeros(len(rewards))
    for members in _groups(groups):
        tokens = [float(rewards[i]) for i in members for _ in range(int(lengths[i]))]
        for i in members:
            out[i] = float(rewards[i]) - _mean(tokens) if tokens else 0.0
    return out


def gpg(rewards, groups, alpha="informative"):
    if alpha == "nonzero":
        counted = sum(1 for r in rewards if float(r) != 0)
    else:
        counted = sum(
            len(members)
            for members in _groups(groups)
            if len({float(rewards[i]) for i in members}) > 1
        )
    factor = len(rewards) / max(counted, 1) if isinstance(alpha, str) else alpha
    return factor * grpo(rewards, groups, scale=None)


def pass_at_k(rewards, groups, scale="group", epsilon=1e-6):
    out = np.zeros(len(rewards))
    for members in _groups(groups):
        chosen = sorted(float(rewards[i]) for i in members)
        if len(chosen) < 2 or chosen[-1] == chosen[-2]:
            continue
        divisor = _deviation(chosen) + epsilon if scale == "group" else 1.0
        best = max(members, key=lambda i: float(rewards[i]))
        out[best] = (chosen[-1] - chosen[-2]) / divisor
    return out


def pass_at_k_exact(rewards, groups, k):
    """Over every choice of k responses, what each adds to the maximum of the others in it."""
    out = np.zeros(len(rewards))
    for members in _groups(groups):
        choices = list(itertools.combinations(members, k))
        for choice in choices:
            for i in choice:
                without = max(float(rewards[j]) for j in choice if j != i)
                gain = max(float(rewards[i]), without) - without
                out[i] += gain * len(members) / len(choices)
    return out


def gdpo(
    rewards,
    groups,
    weights=None,
    lengths=None,
    whitened=True,
    epsilon=1e-6,
    whiten_epsilon=1e-8,
):
    total = [0.0] * len(rewards)
    for c in range(len(rewards[0])):
        normalised = grpo([row[c] for row in rewards], groups, epsilon=epsilon)
        for i in range(len(rewards)):
            total[i] += (1.0 if weights is None else float(weights[c])) * normalised[i]
    if not whitened:
        return np.array(total)
    counted = []
    for i, value in enumerate(total):
        counted += [value] * (1 if lengths is None else int(lengths[i]))
    mean = _mean(counted)
    scale = math.sqrt(_deviation(counted) ** 2 + whiten_epsilon)
    return np.array([(value - mean) / scale for value in total])


def _of_those_with_tokens(estimator, rewards, groups, mask, **settings):
    """An estimator on the responses that have a token, 0 for the others."""
    present = [i for i, times in enumerate(rows(mask)) if times]
    out = np.zeros(len(rewards))
    out[present] = estimator(
        [rewards[i] for i in present], [groups[i] for i in present], **settings
    )
    return out


def token_level_group_average(rewards, groups, mask, epsilon=1e-6, fallback=None):
    out = np.zeros(np.shape(mask))
    times = rows(mask)
    plain = _of_those_with_tokens(grpo, rewards, groups, mask)
    for members in _groups(groups):
        tokens = [float(rewards[i]) for i in members for _ in times[i]]
        if not tokens:
            continue
        mean, deviation = _mean(tokens), _deviation(tokens, unbiased=False)
        values = {
            i: (float(rewards[i]) - mean) / (deviation + epsilon) if deviation else 0.0
            for i in members
            if times[i]
        }
        if fallback is not None and max(abs(v) for v in values.values()) >= fallback:
            values = {i: plain[i] for i in values}
        for i, value in values.items():
            for t in times[i]:
                out[i, t] = value
    return out


def rewards_to_go(rewards, mask, gamma=1.0):
    out = np.zeros(np.shape(mask))
    gamma = np.broadcast_to(np.asarray(gamma, float), out.shape)
    for i, times in enumerate(rows(mask)):
        for place, start in enumerate(times):
            weight = 1.0
            for t in times[place:]:
                out[i, start] += weight * float(rewards[i][t])
                weight *= gamma[i, t]
    return out


def reinforce_plus_plus(rewards, mask, gamma=1.0, whitened=True):
    to_go = rewards_to_go(rewards, mask, gamma)
    return whiten(to_go, mask) if whitened else to_go


def reinforce_plus_plus_baseline(rewards, groups, mask):
    advantages = _of_those_with_tokens(grpo, rewards, groups, mask, scale=None)
    return whiten(np.broadcast_to(advantages[:, None], np.shape(mask)), mask)


def remax(rewards, greedy_rewards, mask):
    out = rewards_to_go(rewards, mask)
    for i, times in enumerate(rows(mask)):
        for t in times:
            out[i, t] -= float(greedy_rewards[i])
    return out


def optimal_token_baseline(
    rewards,
    groups,
    logprobs,
    sum_squared_probs,
    mask,
    importance_weights=None,
    epsilon=0.0,
    lone_tail=False,
):
    out, times = rewards_to_go(rewards, mask), rows(mask)
    path = {}
    for i, ts in enumerate(times):
        total = 0.0
        for place, t in enumerate(ts):
            step = 1 - 2 * math.exp(float(logprobs[i][t])) + float(sum_squared_probs[i][t])
            weight = 1.0 if importance_weights is None else float(importance_weights[i][t])
            total += step * weight * weight
            path[i, place] = total
    to_go = out.copy()
    for members in _groups(groups):
        for i in members:
            for place, t in enumerate(times[i]):
                there = [j for j in members if len(times[j]) > place]
                if lone_tail and len(there) == 1:
                    continue
                above = math.fsum(path[j, place] * to_go[j, times[j][place]] for j in there)
                below = math.fsum(path[j, place] for j in there) + epsilon
                out[i, t] -= above / below if below else 0.0
    return out


def length_adaptive_lambda(length, alpha, floor):
    return floor if length == 0 else max(1 - 1 / (alpha * length), floor)


def effective_length(length, truncated, window):
    return length + 0.5 * window if truncated else float(length)


def whiten(x, mask, unbiased=True, keep_mean=False, epsilon=1e-8, min_variance=None):
    chosen = [float(x[i][t]) for i, times in enumerate(rows(mask)) for t in times]
    out = np.zeros(np.shape(mask))
    if not chosen:
        return out
    mean = math.fsum(chosen) / len(chosen)
    squares = math.fsum((c - mean) ** 2 for c in chosen)
    variance = squares / max(len(chosen) - 1 if unbiased else len(chosen), 1)
    variance = variance if min_variance is None else max(variance, min_variance)
    for i, times in enumerate(rows(mask)):
        for t in times:
            centred = float(x[i][t]) - mean
            scaled = centred / math.sqrt(variance + epsilon) if variance + epsilon else 0.0
            out[i, t] = scaled + (mean if keep_mean else 0.0)
    return out
