"""Forward and backward pass of a function as two functions, with the residuals as arrays.

`jax.vjp` returns a function that holds the residuals of the backward pass. A pipeline runs other
micro-batches forward before it runs one backward, so it keeps the residuals of multiple
micro-batches: as arrays, in a buffer. Residuals that depend on the weights only, such as their
copies in another dtype, are not kept but recomputed, as the weights are available in the backward
pass.
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
      program: jaxpr of the forward pass: from the flat arguments to its results and then its
        residuals.
      results: the tree structure of the results.
      pull: the tree structure of the VJP function.
      stored: the residuals that are stored, as indices of the program's outputs.
      places: of each residual, its index in the program's outputs.
      num_again: number of flat arguments that the backward pass receives too.
    """

    program: Any
    results: Any
    pull: Any
    stored: tuple[int, ...]
    places: tuple[int, ...]
    num_again: int

    def forward(self, again: Tree, x: Tree, *others: Tree) -> tuple[Any, list[Array]]:
        """Forward pass: ``((out, aux), residuals)``."""
        outs = self._outs(jax.tree.leaves((again, x, *others)), self._wanted())
        number = self.results.num_leaves
        return self.results.unflatten(outs[:number]), outs[number:]

    def backward(self, again: Tree, residuals: list[Array], gradient: Tree) -> tuple[Tree, Tree]:
        """Backward pass: the gradients of the weights and of `x`, from that of `out`."""
        rest = sorted(set(self.places) - set(self.stored))
        values = dict(zip(self.stored, residuals, strict=True))
        values |= zip(rest, self._outs(jax.tree.leaves(again), rest), strict=True)
        return self.pull.unflatten([values[place] for place in self.places])(gradient)

    def _wanted(self) -> list[int]:
        return [*range(self.results.num_leaves), *self.stored]

    def _outs(self, given: list[Array], places: list[int]) -> list[Array]:
        """Evaluates a subset of the program's outputs, by the equations that they depend on only.

        Args:
          given: the flat arguments, the leading ones or all.
          places: indices of the outputs, ascending.
        """
        alone, used = _part(self.program.jaxpr, places)
        used = [place for place, is_used in enumerate(used) if is_used]
        return core.eval_jaxpr(alone, self.program.consts, *(given[place] for place in used))


def halves(function: Callable[..., Any], again: Tree, x: Tree, *others: Tree) -> Halves:
    """Splits ``function((weights, ...), x, *others) -> (out, aux)`` into forward and backward pass.

    The backward pass is that to the weights and to `x`. The arguments are examples: arrays of the
    types that the passes will receive.

    Args:
      function: the function to differentiate.
      again: the weights, then other inputs that are available in the backward pass too.
      x: input to differentiate besides the weights; may be empty.
      others: inputs without a gradient.
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
    # A residual that occurs twice is stored once.
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
    """Predicate of an output's index: true if it depends on more than the leading inputs."""
    reached = {id(variable) for variable in jaxpr.invars[num_again:]}
    mixed = set()
    for equation in jaxpr.eqns:
        if any(id(variable) in reached for variable in equation.invars):
            reached |= {id(variable) for variable in equation.outvars}
            # A loop or a branch: each of its outputs may depend on a subset of the inputs.
            if len(equation.outvars) > 1:
                mixed |= {id(variable) for variable in equation.outvars}

    def depends(place: int) -> bool:
        variable = id(jaxpr.outvars[place])
        if variable not in reached or variable not in mixed:
            return variable in reached
        return any(_part(jaxpr, [place])[1][num_again:])

    return depends


def _part(jaxpr: Any, places: list[int]) -> tuple[Any, list[bool]]:
    """Dead-code elimination: the jaxpr of a subset of the outputs, and a mask of used inputs."""
    wanted = set(places)
    return dce_jaxpr(jaxpr, [place in wanted for place in range(len(jaxpr.outvars))])
