"""Weights and masks for a sampler that is not the trainer, sequence by sequence."""

import math

import numpy as np

from oracles.rows import rows


def log_weights(logprobs, behaviour_logprobs, mask):
    """For each row the log-weights of its true tokens, trainer over sampler."""
    return [
        [float(logprobs[i][t]) - float(behaviour_logprobs[i][t]) for t in times]
        for i, times in enumerate(rows(mask))
    ]


def spread_rows(values, mask, dtype=float):
    """One list of values per row, back at the true positions of the mask."""
    out = np.zeros(np.shape(mask), dtype)
    for i, times in enumerate(rows(mask)):
        for t, value in zip(times, values[i], strict=True):
            out[i, t] = value
    return out


def mismatch_weights(logprobs, behaviour_logprobs, mask, level="token", max_log_weight=20.0):
    out = []
    for row in log_weights(logprobs, behaviour_logprobs, mask):
        logs = {
            "token": row,
            "sequence": [math.fsum(row)] * len(row),
            "geometric": [math.fsum(row) / max(len(row), 1)] * len(row),
        }[level]
        if max_log_weight is not None:
            logs = [min(max(x, -max_log_weight), max_log_weight) for x in logs]
        out.append([math.exp(x) for x in logs])
    return spread_rows(out, mask)


def truncated_weight(weight, high=2.0, low=None):
    weight = weight if high is None else min(weight, high)
    return weight if low is None else max(weight, low)


def inside(x, low, high):
    return (low is None or x >= low) and (high is None or x <= high)


def icepop_weight(weight, low=0.5, high=5.0):
    return weight if inside(weight, low, high) else 0.0


def normalized_weights(weights, mask, over="token"):
    kept = [[float(weights[i][t]) for t in times] for i, times in enumerate(rows(mask))]
    if over == "token":
        values = [w for row in kept for w in row]
    else:
        values = [math.fsum(row) / len(row) for row in kept if row]
    mean = math.fsum(values) / max(len(values), 1)
    return spread_rows([[w / mean if mean else w for w in row] for row in kept], mask)


def sequence_masked_weights(logprobs, behaviour_logprobs, mask, low, high):
    out = []
    for row in log_weights(logprobs, behaviour_logprobs, mask):
        stays = bool(row) and inside(math.exp(math.fsum(row) / len(row)), low, high)
        out.append([math.exp(x) if stays else 0.0 for x in row])
    return spread_rows(out, mask)


def geometric_rejection_mask(logprobs, behaviour_logprobs, mask, low, high):
    out = []
    for row in log_weights(logprobs, behaviour_logprobs, mask):
        stays = bool(row) and inside(math.exp(math.fsum(row) / len(row)), low, high)
        out.append([stays] * len(row))
    return spread_rows(out, mask, bool)


def divergence_rejection_mask(logprobs, behaviour_logprobs, mask, bound, kind="k3", over="mean"):
    out = []
    for row in log_weights(logprobs, behaviour_logprobs, mask):
        each = [x * x / 2 if kind == "k2" else math.exp(x) - 1 - x for x in row]
        if over == "token":
            out.append([x <= bound for x in each])
        elif row:
            total = {"sum": math.fsum(each), "mean": math.fsum(each) / len(row), "max": max(each)}
            out.append([total[over] <= bound] * len(row))
        else:
            out.append([])
    return spread_rows(out, mask, bool)


def mismatch_statistics(logprobs, behaviour_logprobs, mask):
    """Each diagnostic as a number."""

    def mean(values):
        values = list(values)
        return math.fsum(values) / len(values)

    sequences = [row for row in log_weights(logprobs, behaviour_logprobs, mask) if row]
    tokens = [x for row in sequences for x in row]
    weight = mean(math.exp(x) for x in tokens)
    return {
        "kl": mean(-x for x in tokens),
        "k3_kl": mean(math.exp(x) - 1 - x for x in tokens),
        "log_ppl_diff": mean(-mean(row) for row in sequences),
        "log_ppl_abs_diff": mean(abs(mean(row)) for row in sequences),
        "chi2_token": mean(math.exp(x) ** 2 for x in tokens) - 1,
        "chi2_seq": mean(math.exp(math.fsum(row)) ** 2 for row in sequences) - 1,
        "weight": weight,
        "eff_sample_size": 1 / mean((math.exp(x) / weight) ** 2 for x in tokens),
    }
