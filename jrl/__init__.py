"""Reinforcement learning on token sequences: the functions one imports, on nothing but jax.

>>> from jrl import gae, ppo_loss, value_loss
"""

from jrl.losses import (
    Aggregation,
    ExplainedVariance,
    KLEstimator,
    Mean,
    aggregate,
    entropy_from_logits,
    explained_variance,
    gae,
    grpo,
    informative_groups,
    kl_estimate,
    length_adaptive_lambda,
    masked_mean,
    overlong_penalty,
    positive_example_loss,
    ppo_loss,
    ppo_surrogate,
    value_loss,
    whiten,
)

__all__ = [  # noqa: RUF022 - in reading order
    "gae",
    "length_adaptive_lambda",
    "grpo",
    "whiten",
    "ppo_loss",
    "ppo_surrogate",
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
    "masked_mean",
    "Mean",
]
