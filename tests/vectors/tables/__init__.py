"""Which functions have vectors, and on which inputs."""

from vectors.tables import (
    advantages,
    diagnostics,
    divergence,
    metrics,
    mismatch,
    policy,
    reduction,
    rewards,
    trust_region,
    value,
)

VECTORS = [
    *reduction.VECTORS,
    *advantages.VECTORS,
    *policy.VECTORS,
    *trust_region.VECTORS,
    *value.VECTORS,
    *divergence.VECTORS,
    *rewards.VECTORS,
    *metrics.VECTORS,
    *mismatch.VECTORS,
    *diagnostics.VECTORS,
]
