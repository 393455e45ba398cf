"""Recomputation of passes whose expert buffers overflowed, with dropless buffers.

Under `moe.execution.Execution.buffer_factor` the buffers of the experts of a device hold a multiple
of the rows of even routing. A pass counts its overflow; if there is any, its result is discarded,
and the same pass is run with buffers for any routing. Both functions are compiled once, the second
when it is first needed. So only time and memory depend on the balance of the routing, and no result
does.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from jaxtyping import Array

from jrl.trainer.learner.mesh_jit import MeshJit
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective, SupervisedObjective

AnyObjective = PolicyObjective | CriticObjective | SupervisedObjective
ObjectiveT = TypeVar("ObjectiveT", bound=AnyObjective)


def with_dropless_buffers(objective: ObjectiveT) -> ObjectiveT:
    """Same objective with dropless buffers, for any routing."""
    return replace(objective, config=objective.config.for_any_routing())


class RetryOnOverflow:
    """Compiled pass without a gradient that is recomputed with dropless buffers on overflow. A call
    returns the result without the overflow.

    Args:
      function: the pass, ``(objective, *args) -> (result, overflow)``; `overflow` is that of
        `moe.router.statistics.overflow_of`.
      num_static: number of leading static arguments, the objective first.
      least_effort: true for a pass that runs rarely on a few rows, see
        `sharding.compiler_options.LEAST_EFFORT`.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Any, Array | None]],
        num_static: int = 1,
        least_effort: bool = False,
    ):
        options: Any = {"static_argnums": tuple(range(num_static)), "least_effort": least_effort}
        self.with_overflow = MeshJit(function, **options)
        # Dropless buffers count no overflow: the second result is None.
        self.dropless = MeshJit(lambda *args: function(*args)[0], **options)
        self.__doc__ = function.__doc__

    def __call__(self, objective: AnyObjective, *args: Any) -> Any:
        if objective.config.execution.buffer_factor is None:
            return self.dropless(objective, *args)
        # A sum over all devices, so that all processes decide alike; reading it blocks.
        result, overflow = self.with_overflow(objective, *args)
        if overflow is None or not int(overflow):
            return result
        return self.dropless(with_dropless_buffers(objective), *args)

    def lower(self, objective: AnyObjective, *args: Any) -> Any:
        """Lowers the pass with dropless buffers."""
        return self.dropless.lower(with_dropless_buffers(objective), *args)


def retry_on_overflow(
    num_static: int = 1,
) -> Callable[[Callable[..., tuple[Any, Array | None]]], RetryOnOverflow]:
    """Decorator that makes a `RetryOnOverflow` of a pass."""
    return partial(RetryOnOverflow, num_static=num_static)
