"""Diagnostics of critics, by loops over compressed rows."""

import math

from oracles.advantages import gae
from oracles.rows import rows


def _pick(x, mask):
    """The true entries of each row that has one."""
    return [[float(x[i][t]) for t in times] for i, times in enumerate(rows(mask)) if times]


def _mean(xs):
    return math.fsum(xs) / len(xs) if xs else 0.0


def _variance(xs):
    centre = _mean(xs)
    return _mean([(x - centre) ** 2 for x in xs])


def _discounted(xs, gamma):
    return math.fsum(gamma**t * x for t, x in enumerate(xs))


def _sign(x):
    return (x > 0) - (x < 0)


def _bucket(length, edges):
    return sum(length > edge for edge in edges)


def by_position(values, returns, mask, num_bins):
    """Per bin: explained variance, bias, root mean square error, tokens."""
    result = [[] for _ in range(num_bins)]
    for vs, gs in zip(_pick(values, mask), _pick(returns, mask), strict=True):
        for t, pair in enumerate(zip(vs, gs, strict=True)):
            result[int(num_bins * t / len(vs) + 1e-9)].append(pair)
    out = []
    for pairs in result:
        errors, targets = [v - g for v, g in pairs], [g for _, g in pairs]
        flat = not pairs or max(targets) == min(targets)
        explained = 0.0 if flat else 1 - _variance(errors) / _variance(targets)
        out.append(
            (explained, _mean(errors), math.sqrt(_mean([e * e for e in errors])), len(pairs))
        )
    return tuple(zip(*out, strict=True))


def calibration(values, successes, mask, low, high, num_bins):
    """Brier score, calibration error, and per bin mean prediction, frequency, tokens."""
    bins, squares = [[] for _ in range(num_bins)], []
    for i, times in enumerate(rows(mask)):
        for t in times:
            p = min(max((float(values[i][t]) - low) / (high - low), 0.0), 1.0)
            bins[min(int(p * num_bins), num_bins - 1)].append((p, float(successes[i])))
            squares.append((p - float(successes[i])) ** 2)
    predicted = [_mean([p for p, _ in pairs]) for pairs in bins]
    observed = [_mean([s for _, s in pairs]) for pairs in bins]
    number = [len(pairs) for pairs in bins]
    gaps = [n * abs(p - o) for n, p, o in zip(number, predicted, observed, strict=True)]
    ece = math.fsum(gaps) / max(sum(number), 1)
    return _mean(squares), ece, predicted, observed, number


def bootstrap_bias(errors, mask, lam, gamma=1.0):
    """The double sum of the identity, on the compressed rows."""
    out = []
    for es in _pick(errors, mask):
        last = len(es)
        out.append(
            [
                (1 - lam)
                * math.fsum(gamma**k * lam ** (k - 1) * es[t + k] for k in range(1, last - t))
                for t in range(last)
            ]
        )
    return out


def bootstrap_bias_bound(errors, advantages, mask, lam, gamma=1.0):
    """Mean size of the bias, mean bound, and the size over the spread of advantages."""
    size = [abs(b) for row in bootstrap_bias(errors, mask, lam, gamma) for b in row]
    bound = []
    for es in _pick(errors, mask):
        worst = max(abs(e) for e in es)
        for t in range(len(es)):
            weights = [gamma**k * (1 - lam) * lam ** (k - 1) for k in range(1, len(es) - t)]
            bound.append(worst * math.fsum(weights))
    spread = math.sqrt(_variance([a for row in _pick(advantages, mask) for a in row]))
    return _mean(size), _mean(bound), _mean(size) / spread if spread else 0.0


def terminal_reach(mask, lam, gamma, threshold):
    """`lam` is one number per row."""
    reached, horizons, relative, per_row = [], [], [], []
    for i, times in enumerate(rows(mask)):
        if not times:
            continue
        decay = gamma * float(lam[i])
        felt = [decay ** (len(times) - 1 - t) > threshold for t in range(len(times))]
        reached += felt
        per_row.append(sum(felt))
        horizon = math.inf if decay >= 1 else 1 / (1 - decay)
        horizons.append(horizon)
        relative.append(min(horizon / len(times), 1.0))
    return (
        _mean([float(x) for x in reached]),
        _mean(per_row),
        math.inf if math.inf in horizons else _mean(horizons),
        _mean(relative),
    )


def lambda_sensitivity(rewards, values, mask, lam, edges):
    """Per bucket of length: correlation, sign agreement, tokens."""
    ours, unbiased = (gae(rewards, values, mask, 1.0, x)[0] for x in (lam, 1.0))
    result = [[] for _ in range(len(edges) + 1)]
    for xs, ys in zip(_pick(ours, mask), _pick(unbiased, mask), strict=True):
        result[_bucket(len(xs), edges)] += list(zip(xs, ys, strict=True))
    out = []
    for pairs in result:
        xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
        scale = math.sqrt(_variance(xs) * _variance(ys))
        centred = [(x - _mean(xs)) * (y - _mean(ys)) for x, y in pairs]
        agree = [float(_sign(x) == _sign(y)) for x, y in pairs]
        out.append((_mean(centred) / scale if scale else 0.0, _mean(agree), len(pairs)))
    return tuple(zip(*out, strict=True))


def guard_rate(lengths, alpha, floor):
    return _mean([float(1 - 1 / (alpha * n) <= floor + 1e-12) for n in lengths if n > 0])


def within_between_variance(advantages, mask):
    picked = _pick(advantages, mask)
    within = _mean([_variance(row) for row in picked])
    between = _variance([_mean(row) for row in picked])
    return within, between, within / between if between else 0.0


def td_concentration(rewards, values, mask, share, gamma=1.0):
    """Gini by all pairs, the mass of the largest, and the gap of the telescoping sum."""
    ginis, masses, gaps = [], [], [0.0]
    for rs, vs in zip(_pick(rewards, mask), _pick(values, mask), strict=True):
        errors = [r + gamma * after - v for r, v, after in zip(rs, vs, [*vs[1:], 0.0], strict=True)]
        sizes = [abs(e) for e in errors]
        total, n = math.fsum(sizes), len(sizes)
        pairs = math.fsum(abs(x - y) for x in sizes for y in sizes)
        ginis.append(pairs / (2 * n * total) if total else 0.0)
        top = math.ceil(share * n - 1e-6)
        masses.append(math.fsum(sorted(sizes, reverse=True)[:top]) / total if total else 0.0)
        gaps.append(abs(_discounted(errors, gamma) - (_discounted(rs, gamma) - vs[0])))
    return _mean(ginis), _mean(masses), max(gaps)


def outcome_contradiction(rewards, values, advantages, mask, gamma=1.0):
    other = []
    picked = (_pick(x, mask) for x in (rewards, values, advantages))
    for rs, vs, advs in zip(*picked, strict=True):
        surprise = _discounted(rs, gamma) - vs[0]
        other += [float(_sign(a) != _sign(surprise)) for a in advs]
    return _mean(other)


def length_share(mask, edges):
    """Per bucket: share of responses and of tokens."""
    lengths = [len(times) for times in rows(mask) if times]
    result = [[n for n in lengths if _bucket(n, edges) == i] for i in range(len(edges) + 1)]
    responses = [len(ns) / max(len(lengths), 1) for ns in result]
    return responses, [sum(ns) / max(sum(lengths), 1) for ns in result]


def negative_share(advantages, mask):
    picked = _pick(advantages, mask)
    lengths, means = [len(row) for row in picked], [_mean(row) for row in picked]
    negative = [n for n, m in zip(lengths, means, strict=True) if m < 0]
    positive = [n for n, m in zip(lengths, means, strict=True) if m > 0]
    return (
        len(negative) / max(len(lengths), 1),
        sum(negative) / max(sum(lengths), 1),
        _mean(negative),
        _mean(positive),
        _mean([a for row in picked for a in row]),
    )


def group_degeneracy(correct, groups):
    members = {g: [bool(c) for c, h in zip(correct, groups, strict=True) if h == g] for g in groups}
    right = _mean([float(all(cs)) for cs in members.values()])
    wrong = _mean([float(not any(cs)) for cs in members.values()])
    single = _mean([sum(cs) / len(cs) for cs in members.values()])
    return right, wrong, single, 1 - wrong, 1 - wrong - single
