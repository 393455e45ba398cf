"""The critic's loss token by token, and what it explains."""

import math

from oracles.rows import rows


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


def bounded_value(x, low, high):
    """The value and its derivative."""
    value = low + (high - low) * (0.5 + math.atan(x) / math.pi)
    return value, (high - low) / (math.pi * (1.0 + x * x))
