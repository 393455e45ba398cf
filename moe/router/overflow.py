"""Overflow count of expert buffers that are sized by a buffer factor."""

from jaxtyping import Array

from moe.config import ModelConfig
from moe.router.statistics import RouterStatistics
from sharding.collectives import all_sum, varying


def overflow_of(router: RouterStatistics[Array] | None, config: ModelConfig) -> Array | None:
    """Number of expert ids that overflowed in a pass, summed over all devices, inside the
    `jax.shard_map`.

    None without experts, or if the buffers are large enough for any routing: compiled programs then
    contain no count.
    """
    if router is None or router.overflow is None or config.execution.buffer_factor is None:
        return None
    return all_sum(router.overflow, tuple(varying(router.overflow)))
