"""Advantage estimators: how much better an action was than expected.

None of them lets a gradient through: an advantage is a fact about the rollout. Nothing is whitened
unless `whiten` is called or the estimator's paper has it in its formula.
"""

from jrl.losses.advantages.components import gdpo
from jrl.losses.advantages.group_relative import dr_grpo, gpg, grpo, maxrl, opo, rloo
from jrl.losses.advantages.group_tokens import token_level_group_average
from jrl.losses.advantages.pass_at_k import pass_at_k, pass_at_k_exact
from jrl.losses.advantages.rewards_to_go import (
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from jrl.losses.advantages.temporal import decoupled_gae, gae, length_adaptive_lambda
from jrl.losses.advantages.truncated import effective_length, extended_gae
from jrl.losses.advantages.whitening import whiten

__all__ = [  # noqa: RUF022 - in reading order
    "gae",
    "decoupled_gae",
    "length_adaptive_lambda",
    "extended_gae",
    "effective_length",
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "gpg",
    "pass_at_k",
    "pass_at_k_exact",
    "gdpo",
    "token_level_group_average",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "optimal_token_baseline",
    "whiten",
]
