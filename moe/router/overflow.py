"""Whether buffers that hold a multiple of what even routing sends held everything."""

from jaxtyping import Array

from moe.config import ModelConfig
from moe.router.statistics import RouterStatistics
from sharding.collectives import all_sum, varying


def overflow_of(router: RouterStatistics[Array] | None, config: ModelConfig) -> Array | None:
    """Choices that overflowed a pass, on all devices together, inside the `jax.shard_map`.

    None where buffers hold any: programs are then what they would be without asking.
    """
    if router is None or router.overflow is None or config.execution.buffer_factor is None:
        return None
    return all_sum(router.overflow, tuple(varying(router.overflow)))
