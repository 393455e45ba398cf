"""Rows of jrl/losses/policy/reinforce.py."""

import oracles

from vectors.call import loss, token
from vectors.objective import Case, Objective
from vectors.tables.policy.batches import (
    EXTREME,
    HIGH,
    LOW,
    SEQ_1,
    UNEVEN,
    per_row,
    policy_loss,
    sequence_level,
    usual_cases,
)

WITHOUT_OLD = ("logprobs", "advantages", "mask")


def without_old(inputs):
    return {name: inputs[name] for name in WITHOUT_OLD}


REINFORCE_CASES = [
    Case("SEQ-1", without_old(SEQ_1)),
    Case("holes", without_old(UNEVEN)),
    Case("one advantage per row", without_old(per_row(UNEVEN))),
]


REINFORCE = policy_loss(
    "reinforce",
    oracles.reinforce_row,
    "l = -A logp",
    "Williams, 1992; GPG, arXiv 2504.02546",
    REINFORCE_CASES,
    "token-mean",
    defaults={"aggregation": "token-mean"},
    calls={"": loss()},
)

ROWS = [
    REINFORCE,
    Objective(
        function="gpg_loss",
        formula="l = -A logp, the loss of REINFORCE",
        source="GPG, arXiv 2504.02546",
        outputs=REINFORCE.outputs,
        oracle=REINFORCE.oracle,
        cases=REINFORCE_CASES,
        defaults={"aggregation": "token-mean"},
    ),
    policy_loss(
        "cispo",
        oracles.cispo_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio), "
        "l = -stop[clip(exp(d), 1 - clip_low, 1 + clip_high)] A max(logp, old - max_log_ratio); a "
        "bound of null is off; for level=sequence exp of the mean of d over the row's true tokens",
        "MiniMax-M1, arXiv 2506.13585; verl",
        [
            *usual_cases(),
            Case("both bounds", UNEVEN, {"clip_low": 0.2, "clip_high": 0.28}),
            Case("no bound", UNEVEN, {"clip_high": None}),
            Case("TRL epsilon_high 5", EXTREME, {"clip_high": 4.0}),
            Case("verl's low of 10", SEQ_1, {"clip_low": 10, "clip_high": 0.2}),
            Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
            *sequence_level(clip_low=0.05, clip_high=0.1),
        ],
        "token-mean",
        {"clip_high": 0.2},
        {"clip_low": 0.2},
        defaults={
            "clip_high": 0.2,
            "level": "token",
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
        },
        calls={
            "": loss(clip_low=0.3),
            "sequence": token(clip_low=0.1, clip_high=0.2, level="sequence", aggregation=None),
        },
    ),
    policy_loss(
        "vespo",
        oracles.vespo_row,
        "with W the product of a row's ratios exp(clip(logp - old, -max_log_ratio, "
        "max_log_ratio)), log phi = lam + k log W - lam W and (k, lam) = (k_positive, "
        "lam_positive) where A >= 0, (k_negative, lam_negative) where A < 0, "
        "l = -stop[phi] A max(logp, old - max_log_ratio)",
        "VESPO, arXiv 2602.10693; TRL",
        [
            *usual_cases(),
            Case(
                "other powers and rates",
                UNEVEN,
                {"k_positive": 1, "lam_positive": 0.5, "k_negative": 1.5, "lam_negative": 0.25},
            ),
        ],
        "token-mean",
        defaults={
            "k_positive": 2.0,
            "lam_positive": 3.0,
            "k_negative": 3.0,
            "lam_negative": 2.0,
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
        },
        calls={"": loss()},
    ),
    policy_loss(
        "dro",
        oracles.dro_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio), "
        "l = -(A max(logp, old - max_log_ratio) - beta / 2 d^2)",
        "DRO, arXiv 2405.19107; verl",
        [*usual_cases(beta=0.3), Case("without a penalty", UNEVEN, {"beta": 0.0})],
        "token-mean",
        weighted={"beta": 0.3},
        defaults={"max_log_ratio": 20.0, "aggregation": "token-mean"},
        required={"beta": 0.5},
        calls={"": loss(beta=0.5)},
    ),
]
