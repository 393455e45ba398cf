"""Rows of the statistics of a batch, which others are given."""

import math

import oracles

from vectors.call import batch, scalar
from vectors.objective import Case, Objective
from vectors.tables.diagnostics.batches import ADVANTAGES, MASK, _named

LOGPROBS = [
    [-0.9, -2.3, -0.5, -0.05, None, None],
    [-0.2, None, -1.0, -3.0, None, -0.4],
    [None] * 6,
    [None, None, -1.2, None, None, None],
    [-0.7, -0.6, -1.5, -2.2, -0.1, -0.3],
]


SAMPLER = [
    [-1.0, -2.1, -0.5, -0.15, None, None],
    [-0.7, None, -1.1, -2.6, None, -0.4],
    [None] * 6,
    [None, None, -1.0, None, None, None],
    [-0.75, -0.6, -1.3, -2.4, -0.05, -0.35],
]


ENTROPY = [
    [0.02, 0.05, 0.1, 0.3, None, None],
    [0.6, None, 0.9, 1.2, None, 2.0],
    [None] * 6,
    [None, None, 0.45, None, None, None],
    [0.7, 0.15, 1.6, 0.35, 0.8, 1e-9],
]


def _covariance_statistics(logprobs, advantages, mask):
    places = [(i, t) for i, times in enumerate(oracles.rows(mask)) for t in times]
    return {
        name: math.fsum(x[i][t] for i, t in places) / len(places)
        for name, x in (("advantages", advantages), ("logprobs", logprobs))
    }


def _entropy_threshold(entropy, mask, fraction=0.2):
    values = sorted(entropy[i][t] for i, times in enumerate(oracles.rows(mask)) for t in times)
    return {"threshold": values[-(math.floor(fraction * (len(values) - 1) + 1e-6) + 1)]}


STATISTICS = (
    "kl",
    "k3_kl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "chi2_token",
    "chi2_seq",
    "weight",
    "eff_sample_size",
)

ROWS = [
    Objective(
        function="mismatch_statistics",
        formula=(
            "With x = logprobs - behaviour_logprobs over the true tokens: mean(-x), "
            "mean(e^x - 1 - x), over sequences the mean of -mean(x) and of |mean(x)|, "
            "mean(e^2x) - 1 over tokens and over sequences of sum(x), mean(e^x), and "
            "1 / mean((e^x / mean(e^x))^2)"
        ),
        source="verl, rollout correction; Kish, 1965, for the effective sample size",
        outputs=STATISTICS,
        oracle=oracles.mismatch_statistics,
        cases=[
            Case("holes", {"logprobs": LOGPROBS, "behaviour_logprobs": SAMPLER, "mask": MASK}),
            Case("equal", {"logprobs": SAMPLER, "behaviour_logprobs": SAMPLER, "mask": MASK}),
        ],
        defaults={"max_log_weight": 20.0},
        calls={"": scalar()},
    ),
    Objective(
        function="entropy_statistics",
        formula=(
            "Of log max(H, 1e-8) over the true tokens: the order statistic "
            "round(quantile (N - 1)), the root mean square distance from it, and the greatest and "
            "least distance over that"
        ),
        source="HAPO, arXiv 2509.16591",
        outputs=["pivot", "scale", "h_max", "h_min"],
        oracle=_named(("pivot", "scale", "h_max", "h_min"), oracles.entropy_statistics),
        cases=[
            Case(f"quantile {q}", {"entropy": ENTROPY, "mask": MASK}, {"quantile": q})
            for q in (0.8, 0.5)
        ],
        defaults={"quantile": 0.8},
        calls={"": batch()},
    ),
    Objective(
        function="entropy_threshold",
        formula="the floor(fraction (N - 1)) + 1 greatest entropy of the N true tokens",
        source="Wang et al., arXiv 2506.01939",
        outputs=["threshold"],
        oracle=_entropy_threshold,
        cases=[
            Case(f"fraction {f}", {"entropy": ENTROPY, "mask": MASK}, {"fraction": f})
            for f in (0.2, 0.5)
        ],
        defaults={"fraction": 0.2},
        calls={"": scalar(fraction=0.4)},
    ),
    Objective(
        function="covariance_statistics",
        formula="means of the advantages and of the log-probabilities over the true tokens",
        source="Cui et al., arXiv 2505.22617",
        outputs=["advantages", "logprobs"],
        oracle=_covariance_statistics,
        cases=[
            Case("holes", {"logprobs": LOGPROBS, "advantages": ADVANTAGES, "mask": MASK}),
        ],
    ),
]
