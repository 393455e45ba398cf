"""Rows of jrl/losses/policy/token_ratio.py."""

from math import log

import numpy as np
import oracles

from vectors.call import loss, token
from vectors.objective import Case, Objective, per_token
from vectors.tables.policy.batches import (
    HIGH,
    LOW,
    MODES,
    UNEVEN,
    policy_loss,
    sequence_level,
    usual_cases,
)
from vectors.tables.policy.other_batches import NOTHING, REDUCED, TOKENS, _loss

RATIOS = [0.5, 0.79, 1.0, 1.25, 1.3, 4.0, 12.0]


def ratios(advantage):
    """One row of the ratios of CLIP-1."""
    return {
        "logprobs": [[log(ratio) for ratio in RATIOS]],
        "old_logprobs": [[0.0] * 7],
        "advantages": [[advantage]],
        "mask": [[1] * 7],
    }


PPO_CASES = [
    Case("CLIP-1 A=+1 eps .2/.2", ratios(1.0)),
    Case("CLIP-1 A=+1 eps .2/.28", ratios(1.0), {"clip_high": 0.28}),
    Case("CLIP-1 A=+1 eps .2/.28 c=3", ratios(1.0), {"clip_high": 0.28, "clip_dual": 3}),
    Case("CLIP-1 A=-1 eps .2/.2", ratios(-1.0)),
    Case("CLIP-1 A=-1 eps .2/.28", ratios(-1.0), {"clip_high": 0.28}),
    Case("CLIP-1 A=-1 c=3", ratios(-1.0), {"clip_dual": 3}),
    Case("CLIP-1 A=-1 c=4", ratios(-1.0), {"clip_dual": 4}),
    Case(
        "RATIO-1",
        {
            "logprobs": [[-2.3, -2.1, -2.0, -1.9, -1.7]],
            "old_logprobs": [[-2.0] * 5],
            "advantages": [[-1.0]],
            "mask": [[1] * 5],
        },
        {"clip_low": "inf", "clip_high": "inf"},
    ),
    *usual_cases(clip_low=0.2, clip_high=0.28),
    Case(
        "bounds of 0, equal policies",
        {**UNEVEN, "old_logprobs": UNEVEN["logprobs"]},
        {
            "clip_low": 0.0,
            "clip_high": 0.0,
        },
    ),
    Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
    Case("bounds of rows", UNEVEN, {"clip_low": [[0.1], [0.9], [0.0], [0.2]], "clip_high": 0.5}),
    Case("dual clip with holes", UNEVEN, {"clip_dual": 1.5}),
]


def _dppo_loss(logprobs, old_logprobs, advantages, mask, aggregation="token-mean", **settings):
    losses, slopes, acts = oracles.dppo(logprobs, old_logprobs, advantages, mask, **settings)
    return _loss(losses, slopes, acts, mask, aggregation)


DPPO_FORMULA = (
    "With p = exp(logprobs), q = exp(old_logprobs), d = max_divergence: "
    "-A sg(min(p / q, max_ratio)) logprobs where kept, 0 otherwise. kind=tv keeps if A > 0 and "
    "p - q <= d, or A <= 0 and p - q >= -d. kind=kl keeps if q log(q/p) + (1-q) log((1-q)/(1-p)) "
    "<= d, or A > 0 and p <= q, or A <= 0 and p >= q. Of two d the first bounds A <= 0, the second "
    "A > 0."
)


DPPO_SOURCE = "DPPO, arXiv 2602.04879; max_ratio of verl"


DPPO_1 = {
    "logprobs": np.log([[0.95, 0.03], [0.9, 0.01]]).tolist(),
    "old_logprobs": np.log([[0.9, 0.01], [0.95, 0.03]]).tolist(),
    "advantages": [[1.0, 1.0], [-1.0, -1.0]],
    "mask": [[1, 1], [1, 1]],
}


DPPO_CASES = [
    Case("DPPO-1 tv", DPPO_1, {"kind": "tv", "max_divergence": 0.03}),
    Case("DPPO-1 kl", DPPO_1, {"kind": "kl", "max_divergence": 0.013}),
    Case("holes tv", TOKENS, {"kind": "tv", "max_divergence": 0.15}),
    Case("holes kl", TOKENS, {"kind": "kl", "max_divergence": 0.05}),
    Case("capped ratio", TOKENS, {"kind": "tv", "max_divergence": 0.9, "max_ratio": 1.5}),
    Case("no cap", TOKENS, {"kind": "kl", "max_divergence": 9.0, "max_ratio": None}),
    Case("no token", {**TOKENS, "mask": NOTHING}, {"kind": "tv", "max_divergence": 0.1}),
    Case("two bounds tv", TOKENS, {"kind": "tv", "max_divergence": [0.4, 0.05]}),
    Case("two bounds tv, the other way", TOKENS, {"kind": "tv", "max_divergence": [0.05, 0.4]}),
    Case("two bounds kl", TOKENS, {"kind": "kl", "max_divergence": [0.5, 0.01]}),
    Case("two bounds kl, the other way", TOKENS, {"kind": "kl", "max_divergence": [0.01, 0.5]}),
]


# Logarithms of probabilities, which a random batch may have above 0.
POSSIBLE = {
    "logprobs": lambda b: -abs(b["logprobs"]),
    "old_logprobs": lambda b: -abs(b["old_logprobs"]),
}

ROWS = [
    policy_loss(
        "ppo",
        oracles.ppo_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio) and r = exp(d), "
        "l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), then min(l, -A clip_dual) where "
        "A < 0",
        "PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 4; DAPO, arXiv 2503.14476",
        PPO_CASES,
        "token-mean",
        {"clip_low": 0.2, "clip_high": 0.2},
        {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 1.5},
        defaults={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
        },
        calls={
            "": loss(clip_high=0.28, clip_dual=1.5, aggregations=list(MODES)),
            "with a guard": token(guard=1.5, aggregation=None),
        },
    ),
    policy_loss(
        "sapo",
        oracles.sapo_row,
        "with r = exp(clip(logp - old, -max_log_ratio, max_log_ratio)), "
        "l = -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_positive where A > 0, tau_negative where "
        "A <= 0; for level=sequence r = exp of the mean over the row's true tokens",
        "SAPO, arXiv 2511.20347; verl, TRL",
        [
            *usual_cases(),
            Case("other tau", UNEVEN, {"tau_positive": 0.5, "tau_negative": 2}),
            *sequence_level(),
        ],
        "seq-mean-token-mean",
        defaults={
            "tau_positive": 1.0,
            "tau_negative": 1.05,
            "level": "token",
            "max_log_ratio": 20.0,
            "aggregation": "seq-mean-token-mean",
        },
        calls={"": loss(), "sequence": token(level="sequence", aggregation=None)},
    ),
    Objective(
        function="dppo_loss",
        formula=DPPO_FORMULA + REDUCED,
        source=DPPO_SOURCE,
        outputs=["loss", "metrics"],
        oracle=_dppo_loss,
        cases=[
            *DPPO_CASES,
            Case(
                "mean of sequences",
                TOKENS,
                {"kind": "tv", "max_divergence": 0.15, "aggregation": "seq-mean-token-mean"},
            ),
            *per_token(DPPO_CASES),
        ],
        defaults={"max_ratio": 20.0, "max_log_ratio": 20.0, "aggregation": "token-mean"},
        required={"kind": "tv", "max_divergence": 0.25},
        calls={
            "tv": loss(POSSIBLE, kind="tv", max_divergence=0.1, max_ratio=1.5),
            "kl": loss(POSSIBLE, kind="kl", max_divergence=0.05, max_ratio=1.5),
            "tv, two bounds": token(
                POSSIBLE, kind="tv", max_divergence=(0.05, 0.2), max_ratio=1.5, aggregation=None
            ),
        },
    ),
]
