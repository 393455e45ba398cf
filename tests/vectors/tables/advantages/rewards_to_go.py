"""Rows of jrl/losses/advantages/rewards_to_go.py, and of the whitening."""

import jax.numpy as jnp
import oracles

from vectors.call import batch, of, response, token
from vectors.objective import Case, Objective
from vectors.tables.advantages.batches import (
    ADV_1,
    ADV_1_MASK,
    BOOTSTRAP,
    FAR,
    FAR_MASK,
    GAE_1,
    GAMMA,
    GROUP_SOURCE,
    HOLES,
    OTB,
    REWARDS,
    RHO,
    SCORES,
    _advantages,
    _filled,
)


def _terminal(rewards, mask):
    """The reward of each response on the last true token of its row."""
    out = [[0.0 if true else None for true in row] for row in mask]
    for i, row in enumerate(mask):
        places = [t for t, true in enumerate(row) if true]
        if places:
            out[i][places[-1]] = rewards[i]
    return out


ROWS = [
    Objective(
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
        defaults={"gamma": 1.0, "whitened": True},
        calls={"": batch(), "not whitened": token(gamma=of("gamma"), whitened=False)},
    ),
    Objective(
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
        calls={"": response(SCORES)},
    ),
    Objective(
        function="remax_advantages",
        formula="A_t = the sum of the rewards from t on, minus the greedy response's reward",
        source="ReMax, arXiv 2310.10505",
        outputs=["advantages"],
        oracle=_advantages(oracles.remax),
        cases=[
            Case("holes", {"rewards": REWARDS, "greedy_rewards": BOOTSTRAP, "mask": HOLES}),
        ],
        calls={"": token({"greedy_rewards": "scores"})},
    ),
    Objective(
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
        defaults={"epsilon": 0.0, "lone_tail": False},
        calls={
            "": response(
                {"sum_squared_probs": lambda b: jnp.exp(-b["entropy"])},
                importance_weights=of("importance_weights"),
            )
        },
    ),
    Objective(
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
        defaults={"unbiased": True, "keep_mean": False, "epsilon": 1e-08},
        calls={
            "": batch({"x": "advantages"}),
            "mean kept": batch({"x": "advantages"}, keep_mean=True),
            "least variance": batch(
                {"x": "advantages"}, unbiased=False, epsilon=0.0, min_variance=1e-8
            ),
        },
    ),
]
