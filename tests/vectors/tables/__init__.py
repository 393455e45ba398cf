"""Which functions have vectors, and on which inputs."""

from vectors.tables import advantages, mismatch, policy, reduction, trust_region, value
from vectors.tables import advantages, divergence, mismatch, policy, reduction, rewards, value

VECTORS = [
    *reduction.VECTORS,
    *advantages.VECTORS,
    *policy.VECTORS,
    *trust_region.VECTORS,
    *value.VECTORS,
    *divergence.VECTORS,
    *rewards.VECTORS,
    *mismatch.VECTORS,
]
