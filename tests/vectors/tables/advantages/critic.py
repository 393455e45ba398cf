"""Rows of jrl/losses/advantages/critic.py."""

import oracles

from vectors.call import of, token
from vectors.objective import Case, Objective
from vectors.tables.advantages.batches import (
    BOOTSTRAP,
    GAE_1,
    GAMMA,
    HOLES,
    LAM,
    REWARDS,
    VALUES,
    _filled,
)

TOKENS = {"rewards": REWARDS, "values": VALUES, "mask": HOLES}


GAE_3 = {
    "rewards": [[0.0, 0.0, None, 0.0, 1.0]],
    "values": [[0.2, 0.3, None, 0.5, 0.6]],
    "mask": [[1, 1, 0, 1, 1]],
}


BIAS_1 = {
    "rewards": [[0.0, 0.0, 0.0, 0.0, 1.0]] * 2,
    "values": [[0.5, 0.55, 0.6, 0.7, 0.9], [0.7, 0.7, 0.7, 0.75, 0.92]],
    "mask": [[1] * 5] * 2,
}


# Two sequences of three and two tokens in one row, and the two apart.
PACKED = {
    "rewards": [[0.1, -0.2, 1.0, 0.3, -1.0]],
    "values": [[0.5, 0.25, 0.75, -0.5, 0.125]],
    "mask": [[1, 1, 1, 1, 1]],
}


def _gae(rewards, values, mask, gamma=1.0, lam=0.95, bootstrap_value=None, terminated=None):
    gamma, lam = _filled(gamma), _filled(lam)
    result = oracles.gae(rewards, values, mask, gamma, lam, bootstrap_value, terminated)
    return dict(zip(("advantages", "returns"), result, strict=True))


def _decoupled_gae(
    rewards,
    values,
    mask,
    gamma=1.0,
    lam_policy=0.95,
    lam_critic=1.0,
    bootstrap_value=None,
    terminated=None,
):
    tail = (bootstrap_value, terminated)
    return {
        "advantages": oracles.gae(rewards, values, mask, gamma, lam_policy, *tail)[0],
        "returns": oracles.gae(rewards, values, mask, gamma, lam_critic, *tail)[1],
    }


def _extended_gae(rewards, values, mask, truncated, **settings):
    result = oracles.extended_gae(rewards, values, mask, truncated, **settings)
    return dict(zip(("advantages", "returns", "kept_mask"), result, strict=True))


def _lambda(lengths, alpha=0.05, floor=0.0):
    return {"lam": [oracles.length_adaptive_lambda(n, alpha, floor) for n in lengths]}


def _effective_length(lengths, truncated, window):
    pairs = zip(lengths, truncated, strict=True)
    return {"lengths": [oracles.effective_length(n, cut, window) for n, cut in pairs]}


# EGAE-1 and -2: five values, in one window or in two.
EGAE_VALUES = [0.1, 0.3, 0.2, 0.5, 0.4]


def _egae(cut, values=EGAE_VALUES):
    last = 0.0 if cut else 1.0
    return {
        "rewards": [[0.0] * (len(values) - 1) + [last]],
        "values": [list(values)],
        "mask": [[1] * len(values)],
        "truncated": [cut],
    }


LENGTHS = [10, 20, 21, 40, 100, 400, 1000, 8192, 24576]

ROWS = [
    Objective(
        function="gae",
        formula=(
            "delta_t = r_t + gamma_t V_{t+1} - V_t; A_t = delta_t + gamma_t lam_t A_{t+1}; "
            "G_t = A_t + V_t, with t+1 the next true token of the mask; after the last one A = 0 "
            "and V = bootstrap_value, or 0 without it or where terminated."
        ),
        source="Schulman et al., arXiv 1506.02438, eq. 16",
        outputs=["advantages", "returns"],
        oracle=_gae,
        cases=[
            *(Case(f"GAE-1 lam {lam}", GAE_1, {"lam": lam}) for lam in (0.95, 1.0, 0.0)),
            Case("GAE-3 hole", GAE_3, {"lam": 0.5}),
            Case("BIAS-1", BIAS_1, {"lam": 0.9}),
            Case("holes, defaults", TOKENS),
            Case("holes, scalars", TOKENS, {"gamma": 0.97, "lam": 0.8}),
            Case("holes, per row", TOKENS, {"lam": [[0.5], [0.9], [0.0], [1.0], [0.7]]}),
            Case("holes, per token", TOKENS, {"gamma": _filled(GAMMA), "lam": _filled(LAM)}),
            Case("bootstrap", TOKENS, {"gamma": 0.9, "bootstrap_value": BOOTSTRAP}),
            Case(
                "bootstrap where not terminated",
                TOKENS,
                {
                    "gamma": 0.9,
                    "lam": 0.7,
                    "bootstrap_value": BOOTSTRAP,
                    "terminated": [True, False, False, True, True],
                },
            ),
            Case(
                "two sequences in one row, cut by gamma 0",
                PACKED,
                {"gamma": [[0.9, 0.9, 0.0, 0.9, 0.9]], "lam": 0.8},
            ),
        ],
        defaults={"gamma": 1.0, "lam": 0.95},
        calls={
            "": token(gamma=of("gamma"), lam=of("lam")),
            "cut or ended": token(bootstrap_value=of("scores"), terminated=of("correct")),
        },
    ),
    Objective(
        function="decoupled_gae",
        formula=(
            "The advantages of gae with lam = lam_policy and the returns of gae with "
            "lam = lam_critic."
        ),
        source="VC-PPO, arXiv 2503.01491; VAPO, arXiv 2504.05118",
        outputs=["advantages", "returns"],
        oracle=_decoupled_gae,
        cases=[
            Case("LAMBDA-2 alpha 0.5", GAE_1, {"lam_policy": [[0.5], [1 / 3]]}),
            Case("LAMBDA-2 alpha 0.05", GAE_1, {"lam_policy": [[0.0], [0.0]]}),
            Case("holes, defaults", TOKENS),
            Case(
                "holes, bootstrap and ends",
                TOKENS,
                {
                    "gamma": 0.95,
                    "lam_policy": 0.6,
                    "lam_critic": 0.9,
                    "bootstrap_value": BOOTSTRAP,
                    "terminated": [False, True, False, False, False],
                },
            ),
        ],
        defaults={"gamma": 1.0, "lam_policy": 0.95, "lam_critic": 1.0},
        calls={"": token(gamma=of("gamma"), lam_policy=of("lam"), lam_critic=0.9)},
    ),
    Objective(
        function="length_adaptive_lambda",
        formula="lam(l) = max(1 - 1 / (alpha l), floor); l = 0 gives the floor",
        source="VAPO, arXiv 2504.05118, section 4.2",
        outputs=["lam"],
        oracle=_lambda,
        cases=[
            *(
                Case(
                    f"LAMBDA-1 alpha {alpha} floor {floor}",
                    {"lengths": LENGTHS},
                    {"alpha": alpha, "floor": floor},
                )
                for alpha in (0.05, 0.4, 1.5)
                for floor in (0.0, 0.95)
            ),
            Case("defaults, no token", {"lengths": [0, 1, 19, 33]}),
        ],
        defaults={"alpha": 0.05, "floor": 0.0},
    ),
    Objective(
        function="effective_length",
        formula="l + window / 2 where truncated, l elsewhere",
        source="T-PPO, arXiv 2506.15050",
        outputs=["lengths"],
        oracle=_effective_length,
        cases=[
            Case(
                "EGAE-3",
                {"lengths": [8192, 8192, 16384, 300], "truncated": [False, True, True, False]},
                {"window": 8192},
            ),
            Case("odd window", {"lengths": [0, 5], "truncated": [True, True]}, {"window": 7}),
        ],
        required={"window": 4},
    ),
    Objective(
        function="extended_gae",
        formula=(
            "gae with, after the last true token l - 1 of a truncated row, V_l = bootstrap_value, "
            "or V_l = V_{l-1} without it; V_l = 0 for the other rows. The last ignore_last true "
            "tokens of truncated rows get advantage 0 and leave kept_mask; returns are A + V "
            "before that."
        ),
        source="T-PPO, arXiv 2506.15050",
        outputs=["advantages", "returns", "kept_mask"],
        oracle=_extended_gae,
        cases=[
            Case("EGAE-1 unfinished", _egae(True)),
            Case("EGAE-1 unfinished, last 2 ignored", _egae(True), {"ignore_last": 2}),
            Case("EGAE-1 finished", _egae(False), {"ignore_last": 2}),
            Case("EGAE-1 gamma 0.99", _egae(True), {"gamma": 0.99}),
            Case("EGAE-1 lam 1", _egae(True), {"lam": 1.0}),
            Case("EGAE-2 window 1", _egae(True, EGAE_VALUES[:3])),
            Case("EGAE-2 window 2", _egae(False, EGAE_VALUES[3:])),
            Case(
                "EGAE-2 window 1, true bootstrap",
                _egae(True, EGAE_VALUES[:3]),
                {"bootstrap_value": [0.5]},
            ),
            Case(
                "holes",
                {**TOKENS, "truncated": [True, True, False, True, True]},
                {"gamma": 0.9, "lam": 0.8, "ignore_last": 2},
            ),
            Case(
                "holes, true bootstrap",
                {**TOKENS, "truncated": [True, False, True, True, True]},
                {
                    "gamma": 0.9,
                    "lam": [[0.8], [0.7], [0.6], [0.5], [0.4]],
                    "bootstrap_value": BOOTSTRAP,
                    "ignore_last": 1,
                },
            ),
        ],
        defaults={"gamma": 1.0, "lam": 0.95, "ignore_last": 0},
        calls={"": token({"truncated": lambda b: b["correct"] == 0}, gamma=0.9, ignore_last=1)},
    ),
]
