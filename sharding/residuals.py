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
class ForwardBackward:
    """The two passes of `split_passes`.

    Attributes:
      closed_jaxpr: jaxpr of the forward pass: from the flat arguments to its results and then its
        residuals.
      results: the tree structure of the results.
      vjp_tree: the tree structure of the VJP function.
      stored: the residuals that are stored, as indices of the program's outputs.
      output_indices: of each residual, its index in the program's outputs.
      num_shared: number of flat arguments that the backward pass receives too.
    """

    closed_jaxpr: Any
    results: Any
    vjp_tree: Any
    stored: tuple[int, ...]
    output_indices: tuple[int, ...]
    num_shared: int

    def forward(self, shared: Tree, x: Tree, *others: Tree) -> tuple[Any, list[Array]]:
        """Forward pass: ``((out, aux), residuals)``."""
        outs = self._evaluate(jax.tree.leaves((shared, x, *others)), self._forward_indices())
        num_results = self.results.num_leaves
        return self.results.unflatten(outs[:num_results]), outs[num_results:]

    def backward(self, shared: Tree, residuals: list[Array], gradient: Tree) -> tuple[Tree, Tree]:
        """Backward pass: the gradients of the weights and of `x`, from that of `out`."""
        recomputed = sorted(set(self.output_indices) - set(self.stored))
        values = dict(zip(self.stored, residuals, strict=True))
        values |= zip(recomputed, self._evaluate(jax.tree.leaves(shared), recomputed), strict=True)
        return self.vjp_tree.unflatten([values[index] for index in self.output_indices])(gradient)

    def _forward_indices(self) -> list[int]:
        return [*range(self.results.num_leaves), *self.stored]

    def _evaluate(self, args: list[Array], indices: list[int]) -> list[Array]:
        """Evaluates a subset of the program's outputs, by the equations that they depend on only.

        Args:
          args: the flat arguments, the leading ones or all.
          indices: indices of the outputs, ascending.
        """
        pruned, used_inputs = _prune_jaxpr(self.closed_jaxpr.jaxpr, indices)
        used_inputs = [index for index, is_used in enumerate(used_inputs) if is_used]
        return core.eval_jaxpr(
            pruned, self.closed_jaxpr.consts, *(args[index] for index in used_inputs)
        )


def split_passes(
    function: Callable[..., Any], shared: Tree, x: Tree, *others: Tree
) -> ForwardBackward:
    """Splits ``function((weights, ...), x, *others) -> (out, aux)`` into forward and backward pass.

    The backward pass is that to the weights and to `x`. The arguments are examples: arrays of the
    types that the passes will receive.

    Args:
      function: the function to differentiate.
      shared: the weights, then other inputs that are available in the backward pass too.
      x: input to differentiate besides the weights; may be empty.
      others: inputs without a gradient.
    """
    structure: Any = None

    def run(shared: Any, x: Any, *others: Any) -> Any:
        nonlocal structure
        weights, *constants = shared
        out, vjp_fn, aux = jax.vjp(
            lambda weights, x: function((weights, *constants), x, *others), weights, x, has_aux=True
        )
        residuals, structure = jax.tree.flatten(vjp_fn)
        return (out, aux), residuals

    closed_jaxpr, (results, _) = jax.make_jaxpr(run, return_shape=True)(shared, x, *others)
    num_results, num_shared = len(jax.tree.leaves(results)), len(jax.tree.leaves(shared))
    first_index: dict[int, int] = {}
    # A residual that occurs twice is stored once.
    output_indices = [
        first_index.setdefault(id(variable), num_results + index)
        for index, variable in enumerate(closed_jaxpr.jaxpr.outvars[num_results:])
    ]
    depends = _dependence_predicate(closed_jaxpr.jaxpr, num_shared)
    stored = [index for index in sorted(set(output_indices)) if depends(index)]
    return ForwardBackward(
        closed_jaxpr,
        jax.tree.structure(results),
        structure,
        tuple(stored),
        tuple(output_indices),
        num_shared,
    )


def _dependence_predicate(jaxpr: Any, num_shared: int) -> Callable[[int], bool]:
    """Predicate of an output's index: true if it depends on more than the leading inputs."""
    reached = {id(variable) for variable in jaxpr.invars[num_shared:]}
    mixed = set()
    for equation in jaxpr.eqns:
        if any(id(variable) in reached for variable in equation.invars):
            reached |= {id(variable) for variable in equation.outvars}
            # A loop or a branch: each of its outputs may depend on a subset of the inputs.
            if len(equation.outvars) > 1:
                mixed |= {id(variable) for variable in equation.outvars}

    def depends(index: int) -> bool:
        variable = id(jaxpr.outvars[index])
        if variable not in reached or variable not in mixed:
            return variable in reached
        return any(_prune_jaxpr(jaxpr, [index])[1][num_shared:])

    return depends


def _prune_jaxpr(jaxpr: Any, indices: list[int]) -> tuple[Any, list[bool]]:
    """Dead-code elimination: the jaxpr of a subset of the outputs, and a mask of used inputs."""
    wanted = set(indices)
    return dce_jaxpr(jaxpr, [index in wanted for index in range(len(jaxpr.outvars))])
