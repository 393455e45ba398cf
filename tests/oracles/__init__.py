"""Slow float64 loops that say what each function should compute, sharing no code with the library.

They follow the papers' formulas literally: sequences are first compressed to their true tokens, and
everything is then a loop over Python floats. Masks are read by truth, values under them never.
"""

from oracles import diagnostics
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
from oracles.coefficients import (
    adaptive_entropy_coefficient,
    adaptive_kl_coefficient,
)
from oracles.divergence import (
    entropy,
    entropy_slopes,
    kl_clamped_token,
    kl_divergence,
    kl_token,
    token_logprob,
)
from oracles.hapo import (
    adaptive_temperature,
    asymmetric_clip_bounds,
    entropy_signal,
    entropy_statistics,
    hapo,
    redistributed_advantage,
    standardized_entropy,
)
from oracles.metrics import share_of_draws
from oracles.mismatch import (
    divergence_rejection_mask,
    geometric_rejection_mask,
    icepop_weight,
    mismatch_statistics,
    mismatch_weights,
    normalized_weights,
    sequence_masked_weights,
    truncated_weight,
)
from oracles.policy import (
    ppo,
    ppo_token,
)
from oracles.policy_ratio import (
    cispo_row,
    dro_row,
    gmpo_row,
    gspo_row,
    luspo_row,
    policy_loss,
    positive_examples,
    ppo_row,
    reinforce_row,
    sapo_row,
    vespo_row,
)
from oracles.reduction import (
    aggregate,
    token_weights,
)
from oracles.rewards import (
    informative,
    overlong_filter,
    overlong_penalty,
)
from oracles.rows import (
    rows,
)
from oracles.trust_region import (
    clip_cov,
    covariances,
    dppo,
    kl_cov,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from oracles.value import (
    bounded_value,
    explained_variance,
    value_token,
)

__all__ = [  # noqa: RUF022 - by file
    "gae",
    "extended_gae",
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
    "length_adaptive_lambda",
    "effective_length",
    "whiten",
    "adaptive_kl_coefficient",
    "adaptive_entropy_coefficient",
    "kl_token",
    "kl_clamped_token",
    "token_logprob",
    "entropy_slopes",
    "kl_divergence",
    "entropy",
    "entropy_statistics",
    "standardized_entropy",
    "entropy_signal",
    "adaptive_temperature",
    "asymmetric_clip_bounds",
    "redistributed_advantage",
    "hapo",
    "share_of_draws",
    "mismatch_weights",
    "truncated_weight",
    "icepop_weight",
    "normalized_weights",
    "sequence_masked_weights",
    "geometric_rejection_mask",
    "divergence_rejection_mask",
    "mismatch_statistics",
    "ppo_token",
    "ppo",
    "ppo_row",
    "gspo_row",
    "luspo_row",
    "gmpo_row",
    "reinforce_row",
    "cispo_row",
    "vespo_row",
    "sapo_row",
    "dro_row",
    "policy_loss",
    "positive_examples",
    "aggregate",
    "token_weights",
    "overlong_penalty",
    "overlong_filter",
    "informative",
    "rows",
    "dppo",
    "covariances",
    "clip_cov",
    "kl_cov",
    "top_entropy_mask",
    "off_policy_sequence_mask",
    "value_token",
    "explained_variance",
    "bounded_value",
    "diagnostics",
]
