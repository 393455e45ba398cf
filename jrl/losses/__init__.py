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
from jrl.losses.policy import (
    cispo_loss,
    cispo_surrogate,
    dro_loss,
    dro_surrogate,
    gmpo_loss,
    gmpo_surrogate,
    gpg_loss,
    gspo_loss,
    gspo_surrogate,
    luspo_loss,
    luspo_surrogate,
    positive_example_loss,
    ppo_loss,
    ppo_surrogate,
    reinforce_loss,
    reinforce_surrogate,
    sapo_loss,
    sapo_surrogate,
    vespo_loss,
    vespo_surrogate,
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
    "reinforce_loss",
    "reinforce_surrogate",
    "gpg_loss",
    "cispo_loss",
    "cispo_surrogate",
    "vespo_loss",
    "vespo_surrogate",
    "gspo_loss",
    "gspo_surrogate",
    "luspo_loss",
    "luspo_surrogate",
    "gmpo_loss",
    "gmpo_surrogate",
    "sapo_loss",
    "sapo_surrogate",
    "dro_loss",
    "dro_surrogate",
    "positive_example_loss",
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
