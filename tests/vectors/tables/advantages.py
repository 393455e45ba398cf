"""Vectors of jrl/losses/advantages."""

import numpy as np
import oracles

from vectors.vector import Case, Vector

HOLES = [
    [1, 1, 1, 1, 0, 0],
    [1, 1, 0, 0, 1, 1],
    [0, 0, 1, 0, 1, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
]
DRAW = np.random.default_rng(20260101)


def _draw(mask, low, high, digits=3):
    """Numbers of a few digits, None under the mask."""
    return [
        [round(float(DRAW.uniform(low, high)), digits) if true else None for true in row]
        for row in mask
    ]


REWARDS, VALUES = _draw(HOLES, -1, 1), _draw(HOLES, -0.5, 1.5)
GAMMA, LAM = _draw(HOLES, 0.8, 1.0), _draw(HOLES, 0.2, 1.0)
TOKENS = {"rewards": REWARDS, "values": VALUES, "mask": HOLES}
BOOTSTRAP = [0.4, -0.3, 0.8, 5.0, 0.6]

GAE_1 = {
    "rewards": [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, -1.0, None]],
    "values": [[0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, None]],
    "mask": [[1, 1, 1, 1], [1, 1, 1, 0]],
}
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


def _filled(setting):
    """A setting per token with 0 for what is under the mask; other settings as they are."""
    if not isinstance(setting, list):
        return setting
    return [[0.0 if x is None else x for x in row] for row in setting]


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


def _advantages(oracle):
    return lambda *arrays, **settings: {"advantages": oracle(*arrays, **settings)}


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

# ADV-1: two groups of four; "far" has other names, sizes and order, negative rewards and ties.
ADV_1 = {"rewards": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], "groups": [0, 0, 0, 0, 1, 1, 1, 1]}
ADV_1_LENGTHS = [4, 2, 6, 8, 3, 3, 6, 4]
ADV_1_MASK = [[1 if t < length else 0 for t in range(8)] for length in ADV_1_LENGTHS]
FAR = {
    "rewards": [0.3, -1.25, 2.0, 0.1, 0.1, 0.75, -0.5, 0.1, 2.0, 4.5],
    "groups": [7, -3, 7, 100, 100, -3, 7, 100, 7, 55],
}
FAR_LENGTHS = [5, 1, 3, 2, 2, 4, 0, 1, 6, 3]
FAR_MASK = [[1 if 1 <= t <= length else 0 for t in range(8)] for length in FAR_LENGTHS]
POSITIVE = {**FAR, "rewards": [0.3, 1.25, 2.0, 0.0, 0.0, 0.75, 0.5, 0.0, 2.0, 4.5]}
TAIL = {
    # One right answer among twelve, and far shorter than the others: beyond 5 deviations.
    "rewards": [1.0, *[0.0] * 5, 1.0, 0.0],
    "groups": [0, 0, 0, 0, 0, 0, 1, 1],
    "mask": [[1] + [0] * 5, *[[1] * 6] * 5, [1] * 6, [1, 0, 1, 0, 0, 0]],
}
# The first group has a response without a token, whose reward would change mean and deviation.
WITH_AN_EMPTY_ROW = {**TAIL, "mask": [TAIL["mask"][0], [0] * 6, *TAIL["mask"][2:]]}
WITH_AN_EMPTY_ROW["rewards"] = [TAIL["rewards"][0], 9.0, *TAIL["rewards"][2:]]


def _group_cases(*settings):
    return [
        *(Case(f"ADV-1 {name}".strip(), ADV_1, options) for name, options in settings),
        *(
            Case(f"groups of any name, size and order {name}".strip(), FAR, options)
            for name, options in settings
        ),
    ]


def _terminal(rewards, mask):
    """The reward of each response on the last true token of its row."""
    out = [[0.0 if true else None for true in row] for row in mask]
    for i, row in enumerate(mask):
        places = [t for t, true in enumerate(row) if true]
        if places:
            out[i][places[-1]] = rewards[i]
    return out


COMPONENTS = {
    "rewards": [[r, round(0.5 - 0.25 * (i % 3), 2)] for i, r in enumerate(FAR["rewards"])],
    "groups": FAR["groups"],
}
OTB = {
    "rewards": REWARDS,
    "groups": [4, 4, 9, 4, 9],
    "logprobs": _draw(HOLES, -3, -0.05),
    "sum_squared_probs": _draw(HOLES, 0.2, 0.9),
    "mask": HOLES,
}
RHO = _draw(HOLES, 0.5, 2.0)
GROUP_SOURCE = "vectors ADV-1 are derived from the formula"

VECTORS = [
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
        function="grpo_advantages",
        formula=(
            "A_i = (R_i - mean_g) / (std + epsilon), std that of the group (scale=group, with "
            "n - 1, or n if not unbiased), that of all rewards (batch), or no division (null). A "
            "group without variance gives 0; a group of one 0, or its reward with mean 0 and group "
            "std 1 (singleton=reward)."
        ),
        source=f"DeepSeekMath, arXiv 2402.03300, section 4.1.2; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(oracles.grpo),
        cases=[
            *_group_cases(
                ("", {}),
                ("population", {"unbiased": False}),
                ("no scale", {"scale": None}),
                ("batch", {"scale": "batch", "epsilon": 1e-4}),
                ("batch, population", {"scale": "batch", "unbiased": False}),
                ("epsilon 0", {"epsilon": 0.0}),
                ("singleton reward", {"singleton": "reward"}),
            ),
            Case("singleton reward, batch", FAR, {"singleton": "reward", "scale": "batch"}),
            Case("singleton reward, no scale", FAR, {"singleton": "reward", "scale": None}),
            Case("all equal", {"rewards": [0.1] * 7, "groups": [3] * 7}),
            Case("all equal, batch", {"rewards": [0.1] * 7, "groups": [3] * 7}, {"scale": "batch"}),
        ],
    ),
    Vector(
        function="dr_grpo_advantages",
        formula="A_i = R_i - mean_g",
        source=f"Dr. GRPO, arXiv 2503.20783; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(lambda rewards, groups: oracles.grpo(rewards, groups, None)),
        cases=_group_cases(("", {})),
    ),
    Vector(
        function="rloo_advantages",
        formula="A_i = R_i - mean of the others of the group; a group of one gives 0",
        source=f"RLOO, arXiv 2402.14740; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(oracles.rloo),
        cases=_group_cases(("", {})),
    ),
    Vector(
        function="maxrl_advantages",
        formula="A_i = (R_i - mean_g) / mean_g, 0 where the mean is 0",
        source="MaxRL, arXiv 2602.02710",
        outputs=["advantages"],
        oracle=_advantages(oracles.maxrl),
        cases=[*_group_cases(("", {})), Case("a group with mean 0", POSITIVE)],
    ),
    Vector(
        function="opo_advantages",
        formula=(
            "A_i = R_i - sum_j l_j R_j / sum_j l_j over the group; a group without tokens gives 0"
        ),
        source=f"OPO, arXiv 2505.23585; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(oracles.opo),
        cases=[
            Case("ADV-1", {**ADV_1, "lengths": ADV_1_LENGTHS}),
            Case("groups of any name, size and order", {**FAR, "lengths": FAR_LENGTHS}),
            Case(
                "no token",
                {"rewards": [1.0, 2.0, 3.0], "groups": [0, 0, 1], "lengths": [0, 0, 2]},
            ),
        ],
    ),
    Vector(
        function="gpg_advantages",
        formula=(
            "A_i = alpha (R_i - mean_g); alpha a number, or batch / the rows of groups with "
            "different rewards (informative), or batch / the rows with a reward other than 0 "
            "(nonzero); a count of 0 is taken for 1"
        ),
        source=f"GPG, arXiv 2504.02546; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(oracles.gpg),
        cases=[
            *_group_cases(
                ("nonzero", {"alpha": "nonzero"}),
                ("informative", {}),
                ("number", {"alpha": 0.5}),
            ),
            Case("nothing to learn", {"rewards": [0.0, 0.0], "groups": [1, 1]}),
        ],
    ),
    Vector(
        function="pass_at_k_advantages",
        formula=(
            "(best - second best) / (std_g + epsilon) for the best of the group, unbiased std or "
            "no division; 0 for the others, for ties and for a group of one"
        ),
        source="Tang et al., arXiv 2503.19595",
        outputs=["advantages"],
        oracle=_advantages(oracles.pass_at_k),
        cases=_group_cases(("", {}), ("no scale", {"scale": None}), ("epsilon", {"epsilon": 0.1})),
    ),
    Vector(
        function="pass_at_k_exact_advantages",
        formula=(
            "A_i = k times the mean, over the sets J of k - 1 others of the group, of "
            "max(R_i - max_J R, 0); a group smaller than k gives 0"
        ),
        source="Walder and Karkhanis, arXiv 2505.15201",
        outputs=["advantages"],
        oracle=_advantages(oracles.pass_at_k_exact),
        cases=_group_cases(*((f"k {k}", {"k": k}) for k in (2, 3, 4))),
    ),
    Vector(
        function="gdpo_advantages",
        formula=(
            "S_i = sum_c w_c (R_ic - mean_gc) / (std_gc + epsilon); A_i = (S_i - mean) / "
            "sqrt(variance + whiten_epsilon) over the batch, each response counted once or, with "
            "lengths, once per token; unbiased std and variance"
        ),
        source="GDPO, arXiv 2601.05242",
        outputs=["advantages"],
        oracle=_advantages(oracles.gdpo),
        cases=[
            Case("defaults", COMPONENTS),
            Case("weights", COMPONENTS, {"weights": [1.0, 0.25]}),
            Case("not whitened", COMPONENTS, {"whitened": False, "epsilon": 1e-4}),
            Case("by tokens", COMPONENTS, {"lengths": FAR_LENGTHS, "whiten_epsilon": 1e-3}),
        ],
    ),
    Vector(
        function="token_level_group_average",
        formula=(
            "A = (R_i - mean) / (std + epsilon), mean and population std over all tokens of the "
            "group, each with the reward of its response; grpo for a group in which some |A| >= "
            "fallback; a group without variance gives 0; responses without a true token are in "
            "no group"
        ),
        source="HAPO, arXiv 2509.16591",
        outputs=["advantages"],
        oracle=_advantages(oracles.token_level_group_average),
        cases=[
            Case("HAPO-3", {**ADV_1, "mask": ADV_1_MASK}),
            Case("groups of any name, size and order", {**FAR, "mask": FAR_MASK}),
            Case("beyond 5 deviations", TAIL),
            Case("beyond 5 deviations, fallback", TAIL, {"fallback": 5.0}),
            Case("fallback not reached", {**ADV_1, "mask": ADV_1_MASK}, {"fallback": 5.0}),
            Case("fallback, a response without a token", WITH_AN_EMPTY_ROW, {"fallback": 4.5}),
        ],
    ),
    Vector(
        function="reinforce_plus_plus_advantages",
        formula=(
            "G_t = r_t + gamma_t G_{t+1} over the true tokens; whitened: (G - mean) / "
            "sqrt(unbiased variance + 1e-8) over all true tokens of the batch"
        ),
        source=f"REINFORCE++, arXiv 2501.03262; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(oracles.reinforce_plus_plus),
        cases=[
            Case("ADV-1", {"rewards": _terminal(ADV_1["rewards"], ADV_1_MASK), "mask": ADV_1_MASK}),
            Case("holes", {"rewards": REWARDS, "mask": HOLES}, {"gamma": 0.9}),
            Case("holes, not whitened", {"rewards": REWARDS, "mask": HOLES}, {"whitened": False}),
            Case(
                "holes, gamma per token",
                {"rewards": REWARDS, "mask": HOLES},
                {"gamma": _filled(GAMMA), "whitened": False},
            ),
        ],
    ),
    Vector(
        function="reinforce_plus_plus_baseline_advantages",
        formula=(
            "R_i - mean_g on every true token, then (x - mean) / sqrt(unbiased variance + 1e-8) "
            "over all true tokens of the batch; responses without a true token are in no group"
        ),
        source=f"REINFORCE++, arXiv 2501.03262; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(oracles.reinforce_plus_plus_baseline),
        cases=[
            Case("ADV-1", {**ADV_1, "mask": ADV_1_MASK}),
            Case("groups of any name, size and order", {**FAR, "mask": FAR_MASK}),
        ],
    ),
    Vector(
        function="remax_advantages",
        formula="A_t = the sum of the rewards from t on, minus the greedy response's reward",
        source="ReMax, arXiv 2310.10505",
        outputs=["advantages"],
        oracle=_advantages(oracles.remax),
        cases=[
            Case("holes", {"rewards": REWARDS, "greedy_rewards": BOOTSTRAP, "mask": HOLES}),
        ],
    ),
    Vector(
        function="optimal_token_baseline",
        formula=(
            "w_t = (1 - 2 exp(logprob_t) + sum_squared_probs_t) rho_t^2; W its running sum; "
            "B_t = sum W G / (sum W + epsilon) over the group's responses with a t-th true token; "
            "A_t = G_t - B_t; with lone_tail B = 0 where one response alone is that long"
        ),
        source="verl, optimal token baseline",
        outputs=["advantages"],
        oracle=_advantages(oracles.optimal_token_baseline),
        cases=[
            Case("holes", OTB),
            Case("weights", OTB, {"importance_weights": _filled(RHO), "epsilon": 1e-3}),
            Case("lone tail", OTB, {"lone_tail": True}),
        ],
    ),
    Vector(
        function="whiten",
        formula=(
            "(x - mean) / sqrt(max(variance, min_variance) + epsilon) over all true tokens, "
            "variance with n - 1, or n if not unbiased; plus the mean with keep_mean; 0 where the "
            "divisor is 0"
        ),
        source="37 implementation details of PPO, detail 7",
        outputs=["x"],
        oracle=lambda x, mask, **settings: {"x": oracles.whiten(x, mask, **settings)},
        cases=[
            Case(
                "GAE-2",
                {
                    "x": [[0.456725, 0.3755, 0.29, 0.2], [-1.278, -1.24, -1.2, None]],
                    "mask": GAE_1["mask"],
                },
            ),
            *(
                Case(f"holes {settings}", {"x": REWARDS, "mask": HOLES}, settings)
                for settings in (
                    {},
                    {"unbiased": False, "epsilon": 0.0, "min_variance": 1e-8},
                    {"keep_mean": True},
                    {"min_variance": 4.0},
                )
            ),
            Case("one token", {"x": [[None, 5.0]], "mask": [[0, 1]]}),
            Case(
                "one token, OpenRLHF",
                {"x": [[None, 5.0]], "mask": [[0, 1]]},
                {"unbiased": False, "epsilon": 0.0, "min_variance": 1e-8},
            ),
            Case(
                "one token, mean kept", {"x": [[None, 5.0]], "mask": [[0, 1]]}, {"keep_mean": True}
            ),
            Case("one token, no epsilon", {"x": [[None, 5.0]], "mask": [[0, 1]]}, {"epsilon": 0.0}),
        ],
    ),
]
