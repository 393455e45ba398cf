"""Advantage estimators: how much better an action was than expected.

None of them lets a gradient through: an advantage is a fact about the rollout. Nothing is whitened
unless `whiten` is called or the estimator's paper has it in its formula.
"""

from jrl.losses.advantages.critic.decoupled_gae import decoupled_gae
from jrl.losses.advantages.critic.extended_gae import effective_length, extended_gae
from jrl.losses.advantages.critic.gae import gae
from jrl.losses.advantages.critic.lambdas import length_adaptive_lambda
from jrl.losses.advantages.group.best_of_k import (
    pass_at_k_advantages,
    pass_at_k_exact_advantages,
)
from jrl.losses.advantages.group.gdpo import gdpo_advantages
from jrl.losses.advantages.group.gpg import gpg_advantages
from jrl.losses.advantages.group.grpo import dr_grpo_advantages, grpo_advantages
from jrl.losses.advantages.group.maxrl import maxrl_advantages
from jrl.losses.advantages.group.opo import opo_advantages
from jrl.losses.advantages.group.rloo import rloo_advantages
from jrl.losses.advantages.group.token_level_group_average import token_level_group_average
from jrl.losses.advantages.rewards_to_go.optimal_token_baseline import optimal_token_baseline
from jrl.losses.advantages.rewards_to_go.reinforce_plus_plus import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from jrl.losses.advantages.rewards_to_go.remax import remax_advantages
from jrl.losses.advantages.whitening import whiten

__all__ = [  # noqa: RUF022 - in reading order
    "gae",
    "decoupled_gae",
    "length_adaptive_lambda",
    "extended_gae",
    "effective_length",
    "grpo_advantages",
    "dr_grpo_advantages",
    "rloo_advantages",
    "maxrl_advantages",
    "opo_advantages",
    "gpg_advantages",
    "pass_at_k_advantages",
    "pass_at_k_exact_advantages",
    "gdpo_advantages",
    "token_level_group_average",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "optimal_token_baseline",
    "whiten",
]
