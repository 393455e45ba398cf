"""Which functions have vectors, and on which inputs."""

from vectors.tables import advantages, mismatch, policy, reduction, value

VECTORS = [
    *reduction.VECTORS,
    *advantages.VECTORS,
    *policy.VECTORS,
    *value.VECTORS,
    *mismatch.VECTORS,
]
