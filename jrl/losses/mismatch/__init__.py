"""Corrections for a sampler whose probabilities are not quite the trainer's.

Everywhere ``w`` is trainer over sampler, and so are all thresholds. Nothing here has a gradient.
"""

from jrl.losses.mismatch.rejection import (
    RejectionKind,
    RejectionOver,
    divergence_rejection_mask,
    geometric_rejection_mask,
)
from jrl.losses.mismatch.statistics import EffectiveSampleSize, mismatch_statistics
from jrl.losses.mismatch.weights import (
    WeightLevel,
    WeightMean,
    icepop_weights,
    mismatch_weights,
    normalized_weights,
    sequence_masked_weights,
    truncated_weights,
)

__all__ = [  # noqa: RUF022 - in reading order
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
]
