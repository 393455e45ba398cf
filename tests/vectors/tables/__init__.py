"""Which functions have vectors, and on which inputs."""

from vectors.tables import advantages, divergence, mismatch, policy, reduction, rewards, value

VECTORS = [
    *reduction.VECTORS,
    *advantages.VECTORS,
    *policy.VECTORS,
    *value.VECTORS,
    *divergence.VECTORS,
    *rewards.VECTORS,
    *mismatch.VECTORS,
]
