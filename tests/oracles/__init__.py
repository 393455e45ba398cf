"""Slow float64 loops that say what each function should compute, sharing no code with the library.

They follow the papers' formulas literally: sequences are first compressed to their true tokens, and
everything is then a loop over Python floats. Masks are read by truth, values under them never.
"""

from oracles.advantages import gae, grpo, length_adaptive_lambda, whiten
from oracles.divergence import entropy, kl_token
from oracles.hapo import (
    adaptive_temperature,
    asymmetric_clip_bounds,
    entropy_signal,
    entropy_statistics,
    hapo,
    redistributed_advantage,
    standardized_entropy,
)
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
from oracles.policy import ppo, ppo_token
from oracles.reduction import aggregate, token_weights
from oracles.rewards import informative, overlong_penalty
from oracles.rows import rows
from oracles.trust_region import (
    clip_cov,
    covariances,
    dppo,
    kl_cov,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from oracles.value import explained_variance, value_token

__all__ = [  # noqa: RUF022 - by file
    "rows",
    "aggregate",
    "token_weights",
    "gae",
    "grpo",
    "length_adaptive_lambda",
    "whiten",
    "ppo_token",
    "ppo",
    "adaptive_temperature",
    "asymmetric_clip_bounds",
    "entropy_signal",
    "entropy_statistics",
    "hapo",
    "redistributed_advantage",
    "standardized_entropy",
    "clip_cov",
    "covariances",
    "dppo",
    "kl_cov",
    "off_policy_sequence_mask",
    "top_entropy_mask",
    "divergence_rejection_mask",
    "geometric_rejection_mask",
    "icepop_weight",
    "mismatch_statistics",
    "mismatch_weights",
    "normalized_weights",
    "sequence_masked_weights",
    "truncated_weight",
    "value_token",
    "explained_variance",
    "kl_token",
    "entropy",
    "overlong_penalty",
    "informative",
]
