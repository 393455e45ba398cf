"""Passes whose buffers overflowed, run again with buffers that cannot.

Under `moe.execution.Execution.buffer_factor` the buffers of the experts of a device hold a
multiple of what even routing sends to them. A pass counts what overflows; if that is anything, its
result is put aside, and the same pass of a program with buffers for any routing takes its place.
Both are compiled once, the second when it is first needed. So no result depends on how even routing
is, and only time and memory do.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from jaxtyping import Array

from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective, SupervisedObjective
from jrl.trainer.learner.program import Program

AnyObjective = PolicyObjective | CriticObjective | SupervisedObjective
Kind = TypeVar("Kind", bound=AnyObjective)


def for_any_routing(objective: Kind) -> Kind:
    """The same objective with buffers for any routing."""
    return replace(objective, config=objective.config.for_any_routing())


class Exact:
    """A pass without a gradient, ``(objective, *given) -> (found, overflow)``, compiled; called, it
    gives what was found with buffers for everything.

    Args:
      program: the pass; `overflow` is what
        `moe.router.overflow.overflow_of` says.
      num_static: arguments in front that are no arrays, the objective first.
      least_effort: of the compiler, for what runs seldom and on a few rows.
    """

    def __init__(
        self,
        program: Callable[..., tuple[Any, Array | None]],
        num_static: int = 1,
        least_effort: bool = False,
    ):
        how: Any = {"static_argnums": tuple(range(num_static)), "least_effort": least_effort}
        self.counted = Program(program, **how)
        # Where buffers hold any routing nothing is counted: the second result is None.
        self.unbounded = Program(lambda *given: program(*given)[0], **how)
        self.__doc__ = program.__doc__

    def __call__(self, objective: AnyObjective, *given: Any) -> Any:
        if objective.config.execution.buffer_factor is None:
            return self.unbounded(objective, *given)
        # A sum over all devices, so that all processes decide alike; reading it waits for the pass.
        found, overflow = self.counted(objective, *given)
        if overflow is None or not int(overflow):
            return found
        return self.unbounded(for_any_routing(objective), *given)

    def lower(self, objective: AnyObjective, *given: Any) -> Any:
        """The program with buffers for any routing, lowered."""
        return self.unbounded.lower(for_any_routing(objective), *given)


def exact(num_static: int = 1) -> Callable[[Callable[..., tuple[Any, Array | None]]], Exact]:
    """`Exact`, as a decorator."""
    return partial(Exact, num_static=num_static)
