"""Overlapped gradient reduction: gradients are reduced inside the backward pass.

A weight has a gradient in each micro-batch of gradient accumulation. A reduction after the last
micro-batch would send the gradients of the whole network without overlap. Here the backward pass of
the last micro-batch adds, weight by weight, the gradients of the others and starts the reduction:
nothing waits for it, and it does not wait for layers that come later in that pass.

References:
  Jin et al., "MegaScale-MoE", 2025 (gradients of a layer reduced beside the backward pass of the
  next). Megatron-LM calls it `--overlap-grad-reduce`. https://arxiv.org/abs/2505.11432
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from sharding import zero
from sharding.collectives import vary
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


@dataclass(frozen=True)
class Reduction:
    """Reduction of a weight's gradient over devices: the arguments of `zero.reduce_scatter`."""

    mesh: FoldedMesh
    spec: PartitionSpec
    sharded_dim: zero.ShardDim
    is_sharded: bool = False

    def __call__(self, gradient: Array) -> Array:
        return zero.reduce_scatter(
            self.mesh, self.spec, self.sharded_dim, gradient, self.is_sharded
        )

    def sum_zeros(self, weight: Array) -> Array:
        """Zeros of the shape and type of the sum, float32; the weight may vary over any axes."""
        shape = jax.eval_shape(
            lambda weight: self(vary(weight.astype(jnp.float32), self.mesh.axes)), weight
        )
        return vary(
            jnp.zeros(shape.shape, shape.dtype), tuple(sorted(shape.manual_axis_type.varying))
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["weight", "before", "sum_zeros"],
    meta_fields=["reduction"],
)
@dataclass(frozen=True)
class Reduced(Generic[Leaf]):
    """A weight, or a stack of one per layer, whose gradient is reduced inside the backward pass.

    Attributes:
      weight: varying over all mesh axes.
      before: the local gradient of earlier micro-batches, not reduced, float32; None without.
      sum_zeros: zeros of the type of the sum (`Reduction.sum_zeros`): the sum is the gradient of
        these.
      reduction: of the weight.
    """

    weight: Leaf
    before: Leaf | None
    sum_zeros: Leaf
    reduction: Reduction


def weights_of(tree: Any) -> Any:
    """Replaces each `Reduced` of a pytree by its weight; all other leaves are unchanged.

    The gradient of `Reduced.sum_zeros` is the sum over devices of `Reduced.before` and the weight's
    output gradient; the weight itself has none. Within a scan over stacked layers this runs on the
    slice of one layer, and the reduction starts in each iteration of the backward loop.
    """

    def reduced_weight(leaf: Any) -> Any:
        if not isinstance(leaf, Reduced):
            return leaf
        return _reduce_in_backward(leaf.reduction, leaf.weight, leaf.before, leaf.sum_zeros)

    return jax.tree.map(reduced_weight, tree, is_leaf=lambda leaf: isinstance(leaf, Reduced))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reduce_in_backward(
    reduction: Reduction, weight: Array, before: Any, sum_zeros: Array
) -> Array:
    return weight


def _forward(
    reduction: Reduction, weight: Array, before: Any, sum_zeros: Array
) -> tuple[Array, Any]:
    return weight, before


def _backward(reduction: Reduction, before: Any, gradient: Array) -> tuple[None, None, Array]:
    gradient = gradient.astype(jnp.float32)
    return None, None, reduction(gradient if before is None else before + gradient)


_reduce_in_backward.defvjp(_forward, _backward)
