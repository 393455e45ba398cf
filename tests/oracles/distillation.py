"""Distillation, one token at a time; derivatives by the chain rule through every probability."""

import math

from oracles.divergence import probabilities


def distillation_advantage(logprob, teacher, coefficient=1.0, kl=0.0, max_log_ratio=20.0):
    gap = logprob - teacher
    if max_log_ratio is not None and abs(gap) > max_log_ratio:
        gap = math.copysign(max_log_ratio, gap)
    return -coefficient * (gap - kl)


def extrapolated_advantage(logprob, teacher, reference, scale=1.25, max_log_ratio=20.0):
    reward, penalty = teacher - reference, logprob - reference
    if max_log_ratio is not None:
        reward, penalty = (math.copysign(min(abs(x), max_log_ratio), x) for x in (reward, penalty))
    return scale * reward - penalty


def divergence(p, q, beta):
    """Generalised JSD of two lists of probabilities, and its derivatives by each p."""
    if beta == 0:
        value = math.fsum(b * math.log(b / a) for a, b in zip(p, q, strict=True) if b > 0)
        return value, [-b / a if b > 0 else 0.0 for a, b in zip(p, q, strict=True)]
    if beta == 1:
        value = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        return value, [math.log(a / b) + 1 if a > 0 else 0.0 for a, b in zip(p, q, strict=True)]
    terms, slopes = [], []
    for a, b in zip(p, q, strict=True):
        m = beta * b + (1 - beta) * a
        if a > 0:
            terms.append((1 - beta) * a * math.log(a / m))
        if b > 0:
            terms.append(beta * b * math.log(b / m))
        of_mixture = -beta * b / m - (1 - beta) * a / m if m > 0 else 0.0
        of_policy = math.log(a / m) + 1 if a > 0 else 0.0
        slopes.append((1 - beta) * (of_policy + of_mixture))
    return math.fsum(terms), slopes


def jsd(logits, teacher_logits, beta=0.5):
    """Divergence of two softmaxes, and its derivatives by the first logits."""
    p, q = probabilities(logits), probabilities(teacher_logits)
    value, by_p = divergence(p, q, beta)
    mean = math.fsum(a * s for a, s in zip(p, by_p, strict=True))
    return value, [a * (s - mean) for a, s in zip(p, by_p, strict=True)]


def top_k_divergence(logprobs, teacher_logprobs, beta=1.0):
    """Divergence on some tokens and the rest, and its derivatives by the policy."""
    places = [i for i, x in enumerate(teacher_logprobs) if x > -math.inf]
    p = [math.exp(logprobs[i]) for i in places]
    q = [math.exp(teacher_logprobs[i]) for i in places]
    value, by_p = divergence([*p, 1 - math.fsum(p)], [*q, 1 - math.fsum(q)], beta)
    slopes = [0.0] * len(logprobs)
    for i, a, slope in zip(places, p, by_p, strict=False):
        slopes[i] = a * (slope - by_p[-1])
    return value, slopes
