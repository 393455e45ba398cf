"""Slow float64 loops that say what each function should compute, sharing no code with the library.

They follow the papers' formulas literally: sequences are first compressed to their true tokens, and
everything is then a loop over Python floats. Masks are read by truth, values under them never.
"""

from oracles.advantages import (
    effective_length,
    extended_gae,
    gae,
    gdpo,
    gpg,
    grpo,
    length_adaptive_lambda,
    maxrl,
    opo,
    optimal_token_baseline,
    pass_at_k,
    pass_at_k_exact,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rewards_to_go,
    rloo,
    token_level_group_average,
    whiten,
)
from oracles.divergence import entropy, kl_token
from oracles.policy import ppo, ppo_token
from oracles.policy_ratio import (
    cispo_row,
    dro_row,
    gmpo_row,
    gspo_row,
    luspo_row,
    policy_loss,
    policy_surrogate,
    positive_examples,
    ppo_row,
    reinforce_row,
    sapo_row,
    vespo_row,
)
from oracles.reduction import aggregate, token_weights
from oracles.rewards import informative, overlong_penalty
from oracles.rows import rows
from oracles.value import explained_variance, value_token

__all__ = [  # noqa: RUF022 - by file
    "rows",
    "aggregate",
    "token_weights",
    "gae",
    "extended_gae",
    "length_adaptive_lambda",
    "effective_length",
    "grpo",
    "rloo",
    "maxrl",
    "opo",
    "gpg",
    "pass_at_k",
    "pass_at_k_exact",
    "gdpo",
    "token_level_group_average",
    "rewards_to_go",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "optimal_token_baseline",
    "whiten",
    "ppo_token",
    "ppo",
    "cispo_row",
    "dro_row",
    "gmpo_row",
    "gspo_row",
    "luspo_row",
    "policy_loss",
    "policy_surrogate",
    "positive_examples",
    "ppo_row",
    "reinforce_row",
    "sapo_row",
    "vespo_row",
    "value_token",
    "explained_variance",
    "kl_token",
    "entropy",
    "overlong_penalty",
    "informative",
]
