"""Which functions have vectors, and on which inputs."""

from vectors.tables import advantages, mismatch, policy, reduction, trust_region, value

VECTORS = [
    *reduction.VECTORS,
    *advantages.VECTORS,
    *policy.VECTORS,
    *trust_region.VECTORS,
    *value.VECTORS,
    *mismatch.VECTORS,
]
