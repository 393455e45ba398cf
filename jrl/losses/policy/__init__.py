"""Policy losses: a surrogate for each token, then one reduction.

Arguments come *current policy first, then old*; verl and its descendants have it the other way
round. Only the current log-probabilities carry a gradient.
"""

from jrl.losses.policy.covariance import (
    CovarianceStatistics,
    clip_cov_loss,
    clip_cov_surrogate,
    covariance_statistics,
    covariances,
    kl_cov_loss,
    kl_cov_surrogate,
)
from jrl.losses.policy.dro import (
    dro_loss,
    dro_surrogate,
)
from jrl.losses.policy.entropy import (
    EntropySign,
    EntropyStatistics,
    adaptive_temperature,
    entropy_signal,
    entropy_statistics,
    standardized_entropy,
)
from jrl.losses.policy.hapo import (
    asymmetric_clip_bounds,
    hapo_loss,
    hapo_surrogate,
    redistributed_advantages,
)
from jrl.losses.policy.imitation import positive_example_loss
from jrl.losses.policy.ppo import (
    ppo_loss,
    ppo_surrogate,
)
from jrl.losses.policy.reinforce import (
    cispo_loss,
    cispo_surrogate,
    gpg_loss,
    reinforce_loss,
    reinforce_surrogate,
    vespo_loss,
    vespo_surrogate,
)
from jrl.losses.policy.selection import (
    entropy_threshold,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from jrl.losses.policy.sequence_ratio import (
    gmpo_loss,
    gmpo_surrogate,
    gspo_loss,
    gspo_surrogate,
    luspo_loss,
    luspo_surrogate,
)
from jrl.losses.policy.soft_gate import (
    sapo_loss,
    sapo_surrogate,
)
from jrl.losses.policy.trust_region import (
    ProbabilityDistance,
    dppo_loss,
    dppo_surrogate,
)

__all__ = [  # noqa: RUF022 - in reading order
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
    "covariances",
    "covariance_statistics",
    "CovarianceStatistics",
    "clip_cov_surrogate",
    "clip_cov_loss",
    "kl_cov_surrogate",
    "kl_cov_loss",
    "top_entropy_mask",
    "entropy_threshold",
    "off_policy_sequence_mask",
    "positive_example_loss",
]
