"""Slow float64 loops that say what each function should compute, sharing no code with the library.

They follow the papers' formulas literally: sequences are first compressed to their true tokens, and
everything is then a loop over Python floats. Masks are read by truth, values under them never.
"""

from oracles import diagnostics
from oracles.advantages import gae, grpo, length_adaptive_lambda, whiten
from oracles.coefficients import adaptive_entropy_coefficient, adaptive_kl_coefficient
from oracles.divergence import (
    entropy,
    entropy_slopes,
    kl_clamped_token,
    kl_divergence,
    kl_token,
    token_logprob,
)
from oracles.policy import ppo, ppo_token
from oracles.reduction import aggregate, token_weights
from oracles.rewards import informative, overlong_filter, overlong_penalty
from oracles.rows import rows
from oracles.value import bounded_value, explained_variance, value_token

__all__ = [  # noqa: RUF022 - by file
    "diagnostics",
    "rows",
    "aggregate",
    "token_weights",
    "gae",
    "grpo",
    "length_adaptive_lambda",
    "whiten",
    "ppo_token",
    "ppo",
    "value_token",
    "bounded_value",
    "explained_variance",
    "kl_token",
    "kl_clamped_token",
    "kl_divergence",
    "entropy",
    "entropy_slopes",
    "token_logprob",
    "adaptive_kl_coefficient",
    "adaptive_entropy_coefficient",
    "overlong_penalty",
    "overlong_filter",
    "informative",
]
