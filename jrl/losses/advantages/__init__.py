"""Advantage estimators: how much better an action was than expected.

None of them lets a gradient through: an advantage is a fact about the rollout. Nothing is whitened
unless `whiten` is called or the estimator's paper has it in its formula.
"""

from jrl.losses.advantages.best_of_k import (
    pass_at_k_advantages,
    pass_at_k_exact_advantages,
)
from jrl.losses.advantages.critic import (
    decoupled_gae,
    effective_length,
    extended_gae,
    gae,
    length_adaptive_lambda,
)
from jrl.losses.advantages.group import (
    dr_grpo_advantages,
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    rloo_advantages,
    token_level_group_average,
)
from jrl.losses.advantages.rewards_to_go import (
    optimal_token_baseline,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
)
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
