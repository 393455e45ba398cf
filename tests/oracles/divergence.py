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


def kl_clamped_token(log_ratio, kind, max_log_ratio=None, max_value=None):
    """Value and derivative with both clamps; a clamped value has a derivative of 0.

    Clamps do not touch the derivative of a straight-through estimator.
    """
    if kind.endswith("+"):
        value, _ = kl_clamped_token(log_ratio, kind[:-1], max_log_ratio, max_value)
        return value, log_ratio
    clamped = False
    if max_log_ratio is not None and abs(log_ratio) > max_log_ratio:
        log_ratio, clamped = math.copysign(max_log_ratio, log_ratio), True
    value, slope = kl_token(log_ratio, kind)
    if max_value is not None and abs(value) > max_value:
        value, clamped = math.copysign(max_value, value), True
    return value, 0.0 if clamped else slope


def probabilities(logits):
    largest = max(logits)
    weights = [math.exp(z - largest) for z in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def token_logprob(logits, token):
    """Log-probability of a token and its derivatives by the logits."""
    p = probabilities(logits)
    value = math.log(p[token]) if p[token] > 0 else -math.inf
    slopes = [float(v == token) - p[v] for v in range(len(p))]
    return value, [0.0 if z == -math.inf else s for z, s in zip(logits, slopes, strict=True)]


def entropy_slopes(logits):
    """Derivatives of the entropy by the logits."""
    p, h = probabilities(logits), entropy(logits)
    return [-q * (math.log(q) + h) if q > 0 else 0.0 for q in p]


def kl_divergence(logits, ref_logits, direction="policy||reference"):
    """KL over the whole vocabulary and its derivatives by the first logits."""
    p, q = probabilities(logits), probabilities(ref_logits)
    if direction == "reference||policy":
        kl = math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True) if b > 0)
        return kl, [a - b for a, b in zip(p, q, strict=True)]
    kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    slopes = [a * (math.log(a / b) - kl) if a > 0 else 0.0 for a, b in zip(p, q, strict=True)]
    return kl, slopes


def entropy(logits):
    largest = max(logits)
    weights = [math.exp(z - largest) for z in logits]
    total = math.fsum(weights)
    return -math.fsum(w / total * math.log(w / total) for w in weights if w > 0)
