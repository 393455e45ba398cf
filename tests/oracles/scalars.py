"""Oracles of single numbers: adaptive coefficients, metrics of samples, terms of rewards."""

import itertools


def adaptive_kl_coefficient(coefficient, kl, target, num_samples, horizon):
    error = kl / target - 1.0
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return coefficient * (1.0 + error * num_samples / horizon)


def adaptive_entropy_coefficient(coefficient, entropy, target=0.2, step=0.005, low=0.0, high=1.0):
    """The coefficient to keep and the one to apply."""
    if entropy <= target:
        kept = min(coefficient + step, high)
        kept = max(kept, low)
        return kept, kept
    return min(max(coefficient - step, low), high), 0.0


def share_of_draws(num_samples, num_correct, k):
    """Of all choices of k samples, the share that holds a correct one."""
    draws = list(itertools.combinations(range(num_samples), k))
    return sum(any(sample < num_correct for sample in draw) for draw in draws) / len(draws)


def overlong_penalty(length, max_length, buffer, floor=-1.0):
    if length <= max_length - buffer:
        return 0.0
    if buffer == 0:
        penalty = -float(length - max_length)
    else:
        penalty = (max_length - buffer - length) / buffer
    return penalty if floor is None else max(penalty, floor)


def overlong_filter(mask, truncated):
    return [
        [bool(true) and not cut for true in row] for row, cut in zip(mask, truncated, strict=True)
    ]


def informative(scores, groups):
    return [
        len({float(s) for s, g in zip(scores, groups, strict=True) if g == group}) > 1
        for group in groups
    ]
