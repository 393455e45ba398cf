"""Policy losses: a loss for each token, then one reduction.

Arguments come *current policy first, then old*; verl and its descendants have it the other way
round. Only the current log-probabilities carry a gradient.
"""

from jrl.losses.policy.covariance.clip_cov import clip_cov_loss
from jrl.losses.policy.covariance.covariances import (
    CovarianceStatistics,
    covariance_statistics,
    covariances,
)
from jrl.losses.policy.covariance.kl_cov import kl_cov_loss
from jrl.losses.policy.entropy.hapo import (
    asymmetric_clip_bounds,
    hapo_loss,
    redistributed_advantages,
)
from jrl.losses.policy.entropy.signal import (
    EntropySign,
    EntropyStatistics,
    adaptive_temperature,
    entropy_signal,
    entropy_statistics,
    standardized_entropy,
)
from jrl.losses.policy.imitation import positive_example_loss
from jrl.losses.policy.reinforce.cispo import cispo_loss
from jrl.losses.policy.reinforce.dro import dro_loss
from jrl.losses.policy.reinforce.reinforce import gpg_loss, reinforce_loss
from jrl.losses.policy.reinforce.vespo import vespo_loss
from jrl.losses.policy.selection import (
    entropy_threshold,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from jrl.losses.policy.sequence_ratio.gmpo import gmpo_loss
from jrl.losses.policy.sequence_ratio.gspo import gspo_loss
from jrl.losses.policy.sequence_ratio.luspo import luspo_loss
from jrl.losses.policy.token_ratio.dppo import ProbabilityDistance, dppo_loss
from jrl.losses.policy.token_ratio.ppo import ppo_loss
from jrl.losses.policy.token_ratio.sapo import sapo_loss

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
