"""Policy losses: a loss for each token, then one reduction.

Arguments come *current policy first, then old*; verl and its descendants have it the other way
round. Only the current log-probabilities carry a gradient.
"""

from jrl.losses.policy.covariance import (
    CovarianceStatistics,
    clip_cov_loss,
    covariance_statistics,
    covariances,
    kl_cov_loss,
)
from jrl.losses.policy.hapo import (
    asymmetric_clip_bounds,
    hapo_loss,
    redistributed_advantages,
)
from jrl.losses.policy.hapo_signal import (
    EntropySign,
    EntropyStatistics,
    adaptive_temperature,
    entropy_signal,
    entropy_statistics,
    standardized_entropy,
)
from jrl.losses.policy.reinforce import (
    cispo_loss,
    dro_loss,
    gpg_loss,
    positive_example_loss,
    reinforce_loss,
    vespo_loss,
)
from jrl.losses.policy.selection import (
    entropy_threshold,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from jrl.losses.policy.sequence_ratio import gmpo_loss, gspo_loss, luspo_loss
from jrl.losses.policy.token_ratio import ProbabilityDistance, dppo_loss, ppo_loss, sapo_loss

__all__ = [  # noqa: RUF022 - in reading order
    "ppo_loss",
    "reinforce_loss",
    "gpg_loss",
    "cispo_loss",
    "vespo_loss",
    "gspo_loss",
    "luspo_loss",
    "gmpo_loss",
    "sapo_loss",
    "dro_loss",
    "entropy_statistics",
    "EntropyStatistics",
    "standardized_entropy",
    "entropy_signal",
    "EntropySign",
    "adaptive_temperature",
    "asymmetric_clip_bounds",
    "redistributed_advantages",
    "hapo_loss",
    "dppo_loss",
    "ProbabilityDistance",
    "covariances",
    "covariance_statistics",
    "CovarianceStatistics",
    "clip_cov_loss",
    "kl_cov_loss",
    "top_entropy_mask",
    "entropy_threshold",
    "off_policy_sequence_mask",
    "positive_example_loss",
]
