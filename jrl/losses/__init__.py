"""Objectives as functions on arrays. Everything here needs jax and nothing else.

Arrays are `[..., time]`, aligned to the token that they speak about: ``logprobs[b, t]`` is the
log-probability in nats of ``tokens[b, t]`` given what precedes it, ``values[b, t]`` the critic's
estimate of the state before it, and ``mask[b, t]`` is true where the policy sampled it. A mask may
be bool or 0/1 of any dtype and may have holes; what lies where it is false, NaN and inf included,
never reaches a result or a gradient. Inputs in half precision are computed with in float32.

`None` means "off" and 0 means zero. Arrays come first, the current policy before the old one.
"""

from jrl.losses import diagnostics
from jrl.losses.advantages import gae, grpo, length_adaptive_lambda, whiten
from jrl.losses.coefficients import adaptive_entropy_coefficient, adaptive_kl_coefficient
from jrl.losses.divergence import (
    KLDirection,
    KLEstimator,
    entropy_from_logits,
    kl_estimate,
    kl_from_logits,
    logprobs_from_logits,
)
from jrl.losses.policy import positive_example_loss, ppo_loss, ppo_surrogate
from jrl.losses.reduction import Aggregation, Denominators, EmptyRows, Mean, aggregate, masked_mean
from jrl.losses.rewards import informative_groups, overlong_filter, overlong_penalty
from jrl.losses.value import ExplainedVariance, bounded_value, explained_variance, value_loss

__all__ = [  # noqa: RUF022 - in reading order
    "gae",
    "length_adaptive_lambda",
    "grpo",
    "whiten",
    "ppo_loss",
    "ppo_surrogate",
    "positive_example_loss",
    "value_loss",
    "bounded_value",
    "explained_variance",
    "ExplainedVariance",
    "kl_estimate",
    "KLEstimator",
    "kl_from_logits",
    "KLDirection",
    "entropy_from_logits",
    "logprobs_from_logits",
    "adaptive_kl_coefficient",
    "adaptive_entropy_coefficient",
    "overlong_penalty",
    "overlong_filter",
    "informative_groups",
    "diagnostics",
    "aggregate",
    "Aggregation",
    "EmptyRows",
    "Denominators",
    "masked_mean",
    "Mean",
]
