"""Rows of jrl/losses/advantages/group.py and best_of_k.py."""

import jax.numpy as jnp
import oracles

from vectors.call import response
from vectors.objective import Case, Objective
from vectors.tables.advantages.batches import (
    ADV_1,
    ADV_1_LENGTHS,
    ADV_1_MASK,
    FAR,
    FAR_LENGTHS,
    FAR_MASK,
    GROUP_SOURCE,
    SCORES,
    _advantages,
    lengths,
    scores,
)

POSITIVE = {**FAR, "rewards": [0.3, 1.25, 2.0, 0.0, 0.0, 0.75, 0.5, 0.0, 2.0, 4.5]}


TAIL = {
    # One right answer among twelve, and far shorter than the others: beyond 5 deviations.
    "rewards": [1.0, *[0.0] * 5, 1.0, 0.0],
    "groups": [0, 0, 0, 0, 0, 0, 1, 1],
    "mask": [[1] + [0] * 5, *[[1] * 6] * 5, [1] * 6, [1, 0, 1, 0, 0, 0]],
}


# The first group has an empty response, whose reward would change mean and deviation.
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


COMPONENTS = {
    "rewards": [[r, round(0.5 - 0.25 * (i % 3), 2)] for i, r in enumerate(FAR["rewards"])],
    "groups": FAR["groups"],
}

ROWS = [
    Objective(
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
        defaults={"scale": "group", "unbiased": True, "epsilon": 1e-06, "singleton": "zero"},
        calls={"": response(SCORES, epsilon=1e-2)},
    ),
    Objective(
        function="dr_grpo_advantages",
        formula="A_i = R_i - mean_g",
        source=f"Dr. GRPO, arXiv 2503.20783; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(lambda rewards, groups: oracles.grpo(rewards, groups, None)),
        cases=_group_cases(("", {})),
        calls={"": response(SCORES)},
    ),
    Objective(
        function="rloo_advantages",
        formula="A_i = R_i - mean of the others of the group; a group of one gives 0",
        source=f"RLOO, arXiv 2402.14740; {GROUP_SOURCE}",
        outputs=["advantages"],
        oracle=_advantages(oracles.rloo),
        cases=_group_cases(("", {})),
        calls={"": response(SCORES)},
    ),
    Objective(
        function="maxrl_advantages",
        formula="A_i = (R_i - mean_g) / mean_g, 0 where the mean is 0",
        source="MaxRL, arXiv 2602.02710",
        outputs=["advantages"],
        oracle=_advantages(oracles.maxrl),
        cases=[*_group_cases(("", {})), Case("a group with mean 0", POSITIVE)],
        calls={"": response({"rewards": lambda b: 1 + jnp.abs(scores(b))})},
    ),
    Objective(
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
        calls={"": response({**SCORES, "lengths": lengths})},
    ),
    Objective(
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
        defaults={"alpha": "informative"},
        calls={"": response(SCORES, alpha=1.5)},
    ),
    Objective(
        function="pass_at_k_advantages",
        formula=(
            "(best - second best) / (std_g + epsilon) for the best of the group, unbiased std or "
            "no division; 0 for the others, for ties and for a group of one"
        ),
        source="Tang et al., arXiv 2503.19595",
        outputs=["advantages"],
        oracle=_advantages(oracles.pass_at_k),
        cases=_group_cases(("", {}), ("no scale", {"scale": None}), ("epsilon", {"epsilon": 0.1})),
        defaults={"scale": "group", "epsilon": 1e-06},
        calls={"": response(SCORES, epsilon=1e-2)},
    ),
    Objective(
        function="pass_at_k_exact_advantages",
        formula=(
            "A_i = k times the mean, over the sets J of k - 1 others of the group, of "
            "max(R_i - max_J R, 0); a group smaller than k gives 0"
        ),
        source="Walder and Karkhanis, arXiv 2505.15201",
        outputs=["advantages"],
        oracle=_advantages(oracles.pass_at_k_exact),
        cases=_group_cases(*((f"k {k}", {"k": k}) for k in (2, 3, 4))),
        required={"k": 2},
        calls={"": response(SCORES, k=2)},
    ),
    Objective(
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
        defaults={"whitened": True, "epsilon": 1e-06, "whiten_epsilon": 1e-08},
        calls={
            "": response(
                {"rewards": lambda b: jnp.stack([scores(b), scores(b) ** 2], -1)},
                lengths=lengths,
                epsilon=1e-2,
                whiten_epsilon=1e-2,
            )
        },
    ),
    Objective(
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
        defaults={"epsilon": 1e-06},
        calls={"": response(SCORES, fallback=5.0)},
    ),
]
