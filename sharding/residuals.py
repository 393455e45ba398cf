"""A function's forward pass and its backward pass as two functions, with arrays in between.

`jax.vjp` gives back a function that holds what the backward pass needs, its residuals. A pipeline
goes forward with other micro-batches before it comes back, so it keeps the residuals of several at
once: as arrays, in a buffer. Not kept is what can be made of the weights alone, as their copies in
another dtype are: the weights are there when the backward pass runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import core
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

Tree = Any
"""A pytree of arrays."""


@dataclass(frozen=True)
class Halves:
    """The two passes of `halves`.

    Attributes:
      program: the forward pass, traced: of the flat arguments, its results and then its residuals.
      results: the structure of the results.
      pull: the structure of the backward pass as a function.
      stored: which residuals are stored, by their places among what the program gives.
      places: of each residual, its place in the program's outputs.
      num_again: flat arguments that the backward pass is given again.
    """

    program: Any
    results: Any
    pull: Any
    stored: tuple[int, ...]
    places: tuple[int, ...]
    num_again: int

    def forward(self, again: Tree, x: Tree, *others: Tree) -> tuple[Any, list[Array]]:
        """``((out, aux), residuals)``."""
        outs = self._outs(jax.tree.leaves((again, x, *others)), self._wanted())
        number = self.results.num_leaves
        return self.results.unflatten(outs[:number]), outs[number:]

    def backward(self, again: Tree, residuals: list[Array], gradient: Tree) -> tuple[Tree, Tree]:
        """The gradients of the weights and of `x`, from that of `out`."""
        rest = sorted(set(self.places) - set(self.stored))
        values = dict(zip(self.stored, residuals, strict=True))
        values |= zip(rest, self._outs(jax.tree.leaves(again), rest), strict=True)
        return self.pull.unflatten([values[place] for place in self.places])(gradient)

    def _wanted(self) -> list[int]:
        return [*range(self.results.num_leaves), *self.stored]

    def _outs(self, given: list[Array], places: list[int]) -> list[Array]:
        """Some outputs of the program, by nothing but what they depend on.

        Args:
          given: the flat arguments, those in front or all.
          places: of the outputs, ascending.
        """
        alone, used = _part(self.program.jaxpr, places)
        used = [place for place, is_used in enumerate(used) if is_used]
        return core.eval_jaxpr(alone, self.program.consts, *(given[place] for place in used))


def halves(function: Callable[..., Any], again: Tree, x: Tree, *others: Tree) -> Halves:
    """The forward pass of ``function((weights, ...), x, *others) -> (out, aux)`` and its backward
    pass to the weights and to `x`.

    The arguments are examples: arrays of the types of what the passes will be given.

    Args:
      function: what goes forward.
      again: the weights and what else there will be for the backward pass too.
      x: what a gradient is wanted of besides the weights; may be empty.
      others: what no gradient is wanted of.
    """
    structure: Any = None

    def run(again: Any, x: Any, *others: Any) -> Any:
        nonlocal structure
        weights, *beside = again
        out, pull, aux = jax.vjp(
            lambda weights, x: function((weights, *beside), x, *others), weights, x, has_aux=True
        )
        residuals, structure = jax.tree.flatten(pull)
        return (out, aux), residuals

    program, (results, _) = jax.make_jaxpr(run, return_shape=True)(again, x, *others)
    number, num_again = len(jax.tree.leaves(results)), len(jax.tree.leaves(again))
    first_of: dict[int, int] = {}
    # What is a residual twice is stored once.
    places = [
        first_of.setdefault(id(variable), number + place)
        for place, variable in enumerate(program.jaxpr.outvars[number:])
    ]
    depends = _depending(program.jaxpr, num_again)
    stored = [place for place in sorted(set(places)) if depends(place)]
    return Halves(
        program, jax.tree.structure(results), structure, tuple(stored), tuple(places), num_again
    )


def _depending(jaxpr: Any, num_again: int) -> Callable[[int], bool]:
    """Whether an output depends on more than the inputs in front."""
    reached = {id(variable) for variable in jaxpr.invars[num_again:]}
    mixed = set()
    for equation in jaxpr.eqns:
        if any(id(variable) in reached for variable in equation.invars):
            reached |= {id(variable) for variable in equation.outvars}
            # A loop or a branch: each of what it gives may depend on some inputs only.
            if len(equation.outvars) > 1:
                mixed |= {id(variable) for variable in equation.outvars}

    def depends(place: int) -> bool:
        variable = id(jaxpr.outvars[place])
        if variable not in reached or variable not in mixed:
            return variable in reached
        return any(_part(jaxpr, [place])[1][num_again:])

    return depends


def _part(jaxpr: Any, places: list[int]) -> tuple[Any, list[bool]]:
    """The part of a program that makes some of its outputs, and which inputs that takes."""
    wanted = set(places)
    return dce_jaxpr(jaxpr, [place in wanted for place in range(len(jaxpr.outvars))])
