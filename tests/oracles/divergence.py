"""Divergences and entropies, one token at a time."""

import math


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
