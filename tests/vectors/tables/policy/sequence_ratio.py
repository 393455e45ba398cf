"""Rows of jrl/losses/policy/sequence_ratio.py."""

import oracles

from vectors.call import loss, token
from vectors.objective import Case
from vectors.tables.policy.batches import (
    HIGH,
    LOW,
    SEQ_1,
    UNEVEN,
    per_row,
    policy_loss,
    usual_cases,
)

GSPO_CASES = [
    *usual_cases(),
    Case("SEQ-1 sequence gradient", SEQ_1, {"gradient": "sequence"}),
    Case("holes, sequence gradient", UNEVEN, {"gradient": "sequence"}),
    Case("one advantage per row, sequence gradient", per_row(UNEVEN), {"gradient": "sequence"}),
    Case(
        "a clamp that acts, sequence gradient",
        UNEVEN,
        {"gradient": "sequence", "max_log_ratio": 0.4, "clip_low": 0.5, "clip_high": 0.5},
    ),
    Case("wide bounds", UNEVEN, {"clip_low": 0.1, "clip_high": 0.3}),
    Case("without bounds", UNEVEN, {"clip_low": "inf", "clip_high": "inf"}),
    Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
    Case("dual clip", UNEVEN, {"clip_dual": 1.5}),
    Case("dual clip, sequence gradient", UNEVEN, {"clip_dual": 1.5, "gradient": "sequence"}),
]

ROWS = [
    policy_loss(
        "gspo",
        oracles.gspo_row,
        "with s_i = exp(mean of clip(logp - old, -max_log_ratio, max_log_ratio) over the row's "
        "true tokens), s_it = stop[s_i] p_it / stop[p_it] for gradient=token and s_i for "
        "gradient=sequence, l = max(-A s_it, -A clip(s_it, 1 - clip_low, 1 + clip_high)), then "
        "min(l, -A clip_dual) where A < 0",
        "GSPO, arXiv 2507.18071, sections 4.1 and 4.3; verl, TRL",
        GSPO_CASES,
        "seq-mean-token-mean",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        {"clip_low": 0.1, "clip_high": 0.3, "gradient": "sequence"},
        defaults={
            "clip_low": 0.0003,
            "clip_high": 0.0004,
            "gradient": "token",
            "max_log_ratio": 20.0,
            "aggregation": "seq-mean-token-mean",
        },
        calls={
            "token": loss(clip_low=0.1, clip_high=0.2),
            "sequence": loss(clip_low=0.1, clip_high=0.2, gradient="sequence"),
            "dual clip": token(clip_low=0.1, clip_high=0.2, clip_dual=1.1, aggregation=None),
        },
    ),
    policy_loss(
        "luspo",
        oracles.luspo_row,
        "n_i times the loss of gspo_loss per token, n_i the row's true tokens",
        "LUSPO, arXiv 2602.05261; TRL",
        GSPO_CASES,
        "seq-mean-token-mean",
        {"clip_low": 2e-3, "clip_high": 2.5e-3},
        {"clip_low": 0.1, "clip_high": 0.3},
        defaults={
            "clip_low": 0.002,
            "clip_high": 0.0025,
            "gradient": "token",
            "max_log_ratio": 20.0,
            "aggregation": "seq-mean-token-mean",
        },
        calls={"": loss(clip_low=0.1, clip_high=0.2)},
    ),
    policy_loss(
        "gmpo",
        oracles.gmpo_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio), c = min(d, clip_high) where "
        "A > 0, max(d, -clip_low) where A < 0 and 0 where A = 0, "
        "l = -mean_row(A) exp(mean_row(c)) at every true token of the row",
        "GMPO, arXiv 2507.20673; verl geo_mean",
        [
            *usual_cases(),
            Case("narrow bounds", UNEVEN, {"clip_low": 0.15, "clip_high": 0.03}),
            Case("without bounds", UNEVEN, {"clip_low": "inf", "clip_high": "inf"}),
            Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
        ],
        "seq-mean-token-mean",
        {"clip_low": 0.4, "clip_high": 0.4},
        defaults={
            "clip_low": 0.4,
            "clip_high": 0.4,
            "max_log_ratio": 20.0,
            "aggregation": "seq-mean-token-mean",
        },
        calls={"": loss()},
    ),
]
