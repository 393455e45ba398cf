"""Objectives as functions on arrays. Everything here needs jax and nothing else.

Arrays are `[..., time]`, aligned to the token that they speak about: ``logprobs[b, t]`` is the
log-probability in nats of ``tokens[b, t]`` given what precedes it, ``values[b, t]`` the critic's
estimate of the state before it, and ``mask[b, t]`` is true where the policy sampled it. A mask may
be bool or 0/1 of any dtype and may have holes; what lies where it is false, NaN and inf included,
never reaches a result or a gradient. Inputs in half precision are computed with in float32.

`None` means "off" and 0 means zero. Arrays come first, the current policy before the old one.
"""

from jrl.losses.advantages import gae, grpo, length_adaptive_lambda, whiten
from jrl.losses.divergence import KLEstimator, entropy_from_logits, kl_estimate
from jrl.losses.mismatch import (
    EffectiveSampleSize,
    RejectionKind,
    RejectionOver,
    WeightLevel,
    WeightMean,
    divergence_rejection_mask,
    geometric_rejection_mask,
    icepop_weights,
    mismatch_statistics,
    mismatch_weights,
    normalized_weights,
    sequence_masked_weights,
    truncated_weights,
)
from jrl.losses.policy import (
    EntropySign,
    EntropyStatistics,
    ProbabilityDistance,
    adaptive_temperature,
    asymmetric_clip_bounds,
    dppo_loss,
    dppo_surrogate,
    entropy_signal,
    entropy_statistics,
    hapo_loss,
    hapo_surrogate,
    positive_example_loss,
    ppo_loss,
    ppo_surrogate,
    redistributed_advantages,
    standardized_entropy,
)
from jrl.losses.reduction import Aggregation, Denominators, EmptyRows, Mean, aggregate, masked_mean
from jrl.losses.rewards import informative_groups, overlong_penalty
from jrl.losses.value import ExplainedVariance, explained_variance, value_loss

__all__ = [  # noqa: RUF022 - in reading order
    "gae",
    "length_adaptive_lambda",
    "grpo",
    "whiten",
    "ppo_loss",
    "ppo_surrogate",
    "positive_example_loss",
    "entropy_statistics",
    "EntropyStatistics",
    "standardized_entropy",
    "entropy_signal",
    "EntropySign",
    "adaptive_temperature",
    "asymmetric_clip_bounds",
    "redistributed_advantages",
    "hapo_surrogate",
    "hapo_loss",
    "dppo_surrogate",
    "dppo_loss",
    "ProbabilityDistance",
    "mismatch_weights",
    "WeightLevel",
    "truncated_weights",
    "icepop_weights",
    "sequence_masked_weights",
    "normalized_weights",
    "WeightMean",
    "geometric_rejection_mask",
    "divergence_rejection_mask",
    "RejectionKind",
    "RejectionOver",
    "mismatch_statistics",
    "EffectiveSampleSize",
    "value_loss",
    "explained_variance",
    "ExplainedVariance",
    "kl_estimate",
    "KLEstimator",
    "entropy_from_logits",
    "overlong_penalty",
    "informative_groups",
    "aggregate",
    "Aggregation",
    "EmptyRows",
    "Denominators",
    "masked_mean",
    "Mean",
]
