"""Policy losses row by row, with every derivative of every token's loss.

A row is a list of its true tokens, each a mapping of floats. What a function returns for a row is a
list with one ``(loss, slopes, metrics)`` per token, where ``slopes[u]`` is the derivative of that
token's loss by the current log-probability of the row's token u.
"""

import math

import numpy as np

from oracles.policy import ppo_token
from oracles.reduction import aggregate, token_weights
from oracles.rows import rows


def _alone(n, t, slope):
    """Slopes of a loss that depends on its own token only."""
    return [slope if u == t else 0.0 for u in range(n)]


def _limited(token, limit):
    """The log-ratio within the limit, and its derivative."""
    d = token["logprobs"] - token["old_logprobs"]
    if limit is not None and d > limit:
        return limit, 0.0
    if limit is not None and d < -limit:
        return -limit, 0.0
    return d, 1.0


def _floored(token, limit):
    """The log-probability no more than the limit below the old one, and its derivative."""
    floor = -math.inf if limit is None else token["old_logprobs"] - limit
    return (token["logprobs"], 1.0) if token["logprobs"] >= floor else (floor, 0.0)


def _common(token, limit):
    """Metrics of the two policies at one token."""
    d, inside = _limited(token, limit)
    return {
        "ppo_kl": -d,
        "ratio": math.exp(d),
        "ratio_squared": math.exp(2 * d),
        "ratio_clamped": 1.0 - inside,
    }


def ppo_row(row, clip_dual=None, max_log_ratio=20.0):
    result = []
    for t, token in enumerate(row):
        d, inside = _limited(token, max_log_ratio)
        loss, slope, acts = ppo_token(
            d, token["advantages"], token["clip_low"], token["clip_high"], clip_dual
        )
        metrics = {
            "pg_clipfrac": float(acts == "clip"),
            "pg_clipfrac_lower": float(acts == "dual"),
            **_common(token, max_log_ratio),
        }
        result.append((loss, _alone(len(row), t, slope * inside), metrics))
    return result


def gspo_row(row, gradient="token", max_log_ratio=20.0, clip_dual=None, by_length=False):
    n = len(row)
    limited = [_limited(token, max_log_ratio) for token in row]
    mean = math.fsum(d for d, _ in limited) / n
    factor = n if by_length else 1
    result = []
    for t, token in enumerate(row):
        loss, slope, acts = ppo_token(
            mean, token["advantages"], token["clip_low"], token["clip_high"], clip_dual
        )
        if gradient == "token":
            slopes = _alone(n, t, factor * slope * limited[t][1])
        else:
            slopes = [factor * slope * inside / n for _, inside in limited]
        metrics = {
            "pg_clipfrac": float(acts == "clip"),
            "ppo_kl": -mean,
            "ratio": math.exp(mean),
            "ratio_squared": math.exp(mean) ** 2,
            "ratio_clamped": 1.0 - limited[t][1],
        }
        if clip_dual is not None:
            metrics["pg_clipfrac_lower"] = float(acts == "dual")
        result.append((factor * loss, slopes, metrics))
    return result


def luspo_row(row, **settings):
    return gspo_row(row, by_length=True, **settings)


def gmpo_row(row, max_log_ratio=20.0):
    n = len(row)
    total, advantage, slopes, bound = 0.0, 0.0, [], []
    for token in row:
        d, inside = _limited(token, max_log_ratio)
        a, clips = token["advantages"], 0.0
        if a == 0:
            d, inside = 0.0, 0.0
        if a > 0 and d > token["clip_high"]:
            d, inside, clips = token["clip_high"], 0.0, 1.0
        if a < 0 and d < -token["clip_low"]:
            d, inside, clips = -token["clip_low"], 0.0, 1.0
        total, advantage = total + d, advantage + a / n
        slopes.append(inside)
        bound.append(clips)
    loss = -advantage * math.exp(total / n)
    return [
        (
            loss,
            [loss * slope / n for slope in slopes],
            {"pg_clipfrac": clips, **_common(token, max_log_ratio)},
        )
        for token, clips in zip(row, bound, strict=True)
    ]


def reinforce_row(row):
    return [
        (
            -token["advantages"] * token["logprobs"],
            _alone(len(row), t, -token["advantages"]),
            {"nll": -token["logprobs"]},
        )
        for t, token in enumerate(row)
    ]


def _at_level(level, row, t, limit):
    """The log-ratio of a token or of its row, its derivatives by every token, and the metrics."""
    if level == "token":
        d, inside = _limited(row[t], limit)
        return d, _alone(len(row), t, inside), _common(row[t], limit)
    limited = [_limited(token, limit) for token in row]
    mean = math.fsum(d for d, _ in limited) / len(row)
    metrics = {
        "ppo_kl": -mean,
        "ratio": math.exp(mean),
        "ratio_squared": math.exp(2 * mean),
        "ratio_clamped": 1.0 - limited[t][1],
    }
    return mean, [inside / len(row) for _, inside in limited], metrics


def cispo_row(row, level="token", max_log_ratio=20.0):
    result = []
    for t, token in enumerate(row):
        d, _, common = _at_level(level, row, t, max_log_ratio)
        ratio = math.exp(d)
        low = -math.inf if token["clip_low"] is None else 1 - token["clip_low"]
        high = math.inf if token["clip_high"] is None else 1 + token["clip_high"]
        weight = min(max(ratio, low), high)
        logprob, inside = _floored(token, max_log_ratio)
        a = token["advantages"]
        metrics = {"pg_clipfrac": float(not low <= ratio <= high), **common}
        result.append(
            (-weight * a * logprob, _alone(len(row), t, -weight * a * inside), metrics),
        )
    return result


def vespo_row(
    row,
    k_positive=2.0,
    lam_positive=3.0,
    k_negative=3.0,
    lam_negative=2.0,
    max_log_ratio=20.0,
):
    log_w = math.fsum(_limited(token, max_log_ratio)[0] for token in row)
    result = []
    for t, token in enumerate(row):
        a = token["advantages"]
        k, lam = (k_positive, lam_positive) if a >= 0 else (k_negative, lam_negative)
        # Beyond exp(700) a float has no more room, and the weight is zero long before.
        phi = 0.0 if log_w > 700 else math.exp(lam + k * log_w - lam * math.exp(log_w))
        logprob, inside = _floored(token, max_log_ratio)
        metrics = {"phi": phi, **_common(token, max_log_ratio)}
        result.append((-phi * a * logprob, _alone(len(row), t, -phi * a * inside), metrics))
    return result


def sapo_row(row, tau_positive=1.0, tau_negative=1.05, level="token", max_log_ratio=20.0):
    result = []
    for t, token in enumerate(row):
        d, inside, common = _at_level(level, row, t, max_log_ratio)
        a, ratio = token["advantages"], math.exp(d)
        tau = tau_positive if a > 0 else tau_negative
        # A logistic function that does not overflow on either side.
        p = 0.5 * (1 + math.tanh(tau * (ratio - 1) / 2))
        slopes = [-a * 4 * p * (1 - p) * ratio * part for part in inside]
        metrics = {"gate": 4 * p * (1 - p), **common}
        result.append((-a * 4 / tau * p, slopes, metrics))
    return result


def dro_row(row, beta, max_log_ratio=20.0):
    result = []
    for t, token in enumerate(row):
        d, inside = _limited(token, max_log_ratio)
        logprob, above_floor = _floored(token, max_log_ratio)
        a, penalty = token["advantages"], 0.5 * beta * d * d
        slope = -a * above_floor + beta * d * inside
        metrics = {"dro_penalty": penalty, **_common(token, max_log_ratio)}
        result.append((-(a * logprob - penalty), _alone(len(row), t, slope), metrics))
    return result


def _at(x, i, t):
    """The entry of an array for a token; numbers and sizes of one serve all."""
    if not isinstance(x, list | np.ndarray):
        return x
    line = x[i if len(x) > 1 else 0]
    return float(line[t if len(line) > 1 else 0])


def over_rows(row_loss, arrays, mask, bounds, settings):
    """Losses ``[batch, time]``, their derivatives ``[batch, time, time]``, metrics by name."""
    shape = np.shape(mask)
    losses, slopes, metrics = np.zeros(shape), np.zeros((*shape, shape[1])), {}
    for i, times in enumerate(rows(mask)):
        row = [{name: _at(x, i, t) for name, x in {**arrays, **bounds}.items()} for t in times]
        if not row:
            continue
        for t, (loss, own, measured) in zip(times, row_loss(row, **settings), strict=True):
            losses[i, t] = loss
            for u, slope in zip(times, own, strict=True):
                slopes[i, t, u] = slope
            for name, value in measured.items():
                metrics.setdefault(name, []).append(value)
    return losses, slopes, metrics


def policy_loss(row_loss, *, aggregation, clip_low=None, clip_high=None):
    """The oracle of a loss: its value (or each token's), its gradient and its metrics."""
    defaults, usual = {"clip_low": clip_low, "clip_high": clip_high}, aggregation

    def oracle(*, mask, importance_weights=None, aggregation=usual, **arguments):
        names = ("num_tokens", "num_sequences", "max_length", "empty_rows")
        denominators = {name: arguments.pop(name) for name in names if name in arguments}
        arrays, bounds, settings = _sorted(arguments, defaults)
        losses, slopes, metrics = over_rows(row_loss, arrays, mask, bounds, settings)
        factors = np.ones(np.shape(mask))
        if aggregation is not None:
            factors = token_weights(mask, aggregation, **denominators)
        if importance_weights is not None:
            for i, times in enumerate(rows(mask)):
                for t in times:
                    losses[i, t] *= _at(importance_weights, i, t)
                    factors[i, t] *= _at(importance_weights, i, t)
        return {
            "loss": aggregate(losses, mask, aggregation, **denominators) if aggregation else losses,
            "metrics": {name: math.fsum(values) / len(values) for name, values in metrics.items()},
            "gradients": {"logprobs": np.einsum("it,itu->iu", factors, slopes)},
        }

    return oracle


def _sorted(arguments, defaults):
    """Arrays, bounds (which may be arrays) and other settings; "inf" is what JSON has for it."""
    numbers = {n: float(x) if x in ("inf", "-inf") else x for n, x in arguments.items()}
    arrays = {n: numbers.pop(n) for n in ("logprobs", "old_logprobs", "advantages") if n in numbers}
    bounds = {n: numbers.pop(n, default) for n, default in defaults.items()}
    return arrays, bounds, numbers


def positive_examples(logprobs, correct, mask, num_tokens=None):
    """The mean negative log-likelihood of the correct rows, its gradient and its metric."""
    tokens = [(i, t) for i, times in enumerate(rows(mask)) if correct[i] for t in times]
    total = math.fsum(-float(logprobs[i][t]) for i, t in tokens)
    count = num_tokens or len(tokens) or 1
    gradient = np.zeros(np.shape(mask))
    for i, t in tokens:
        gradient[i, t] = -1 / count
    return {
        "loss": total / count,
        "metrics": {"positive_nll": total / (len(tokens) or 1)},
        "gradients": {"logprobs": gradient},
    }
