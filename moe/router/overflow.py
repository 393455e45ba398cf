"""Overflow of expert buffers that are sized by a buffer factor: its count, and the retry."""

from collections.abc import Callable
from typing import TypeVar

from jaxtyping import Array

from moe.config import ModelConfig
from moe.router.statistics import RouterStatistics
from sharding.collectives import all_sum, varying

Result = TypeVar("Result")


def overflow_of(router: RouterStatistics[Array] | None, config: ModelConfig) -> Array | None:
    """Number of expert ids that overflowed in a pass, summed over all devices, inside the
    `jax.shard_map`.

    None without experts, or if the buffers are large enough for any routing: compiled programs then
    contain no count.
    """
    if router is None or router.overflow is None or config.execution.buffer_factor is None:
        return None
    return all_sum(router.overflow, tuple(varying(router.overflow)))


def run_with_fallback(
    program: Callable[[], tuple[Result, Array | None]], fallback: Callable[[Result], Result]
) -> tuple[Result, bool]:
    """Runs a compiled function, and another one where its buffers overflowed.

    Args:
      program: returns its result and its overflow (`overflow_of`).
      fallback: the same with buffers for any routing. Gets the result of `program`, which may have
        donated its arguments.

    Returns:
      The result, and true if it is that of `fallback`.
    """
    result, overflow = program()
    # A sum over all devices, so that all processes decide alike; reading it blocks.
    if overflow is None or not int(overflow):
        return result, False
    return fallback(result), True
