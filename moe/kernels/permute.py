"""Token permutation to the order of experts and back, with gradients ("permute" and "unpermute").

The forward pass of one is the backward pass of the other: a gather into slots, and a sum over the
slots of a token. Neither scatters, and neither adds in an order that varies.
"""

from functools import partial

import jax
from jaxtyping import Array, Float

from moe.kernels.layout import SortedLayout
from moe.kernels.rows import combine, combine_gradients, take
from sharding.collectives import vary, varying


def permute(
    x: Float[Array, "token width"], layout: SortedLayout, *, implementation: str | None = None
) -> Float[Array, "slot width"]:
    """Gathers tokens into the slots of a layout, with zeros in empty slots.

    The gradient of a token is the sum over its slots, float32, in the order of its expert ids.

    Args:
      x: tokens.
      layout: sorted layout of their expert ids.
      implementation: "mosaic", "plain" or "interpreted", see `moe.kernels.choice`.

    Raises:
      ValueError: on another implementation, and where "mosaic" does not support the call: on other
        devices than CUDA's, and for rows whose width is not a multiple of 128.
    """
    x, layout = _vary_over_all_axes(x, layout)
    return _permute(x, layout, x.dtype, implementation)


def unpermute(
    rows: Float[Array, "slot width"],
    layout: SortedLayout,
    probs: Float[Array, "token k"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "token width"]:
    """``sum_k probs_k rows[slot_k]`` of each token, float32, rounded once to the rows' dtype.

    The reverse of `permute`, and its gradient where there are no probs. An expert id without a slot
    adds nothing.

    Args:
      rows: rows in the slots of the layout; the contents of empty ones have no effect.
      layout: sorted layout of the tokens' expert ids.
      probs: gate weights; None is 1.
      implementation: as in `permute`, with its errors.
    """
    if probs is None:
        rows, layout = _vary_over_all_axes(rows, layout)
        return _sum(rows, layout, rows.dtype, implementation)
    rows, layout, probs = _vary_over_all_axes(rows, layout, probs)
    return _weighted(rows, layout, probs, implementation)


def _vary_over_all_axes(*operands):
    """Types all operands as varying over the mesh axes that any of them varies over, so that
    gradients are summed over these axes where an operand is replicated."""
    axes = frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(operands)))
    return vary(operands, tuple(axes))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _permute(x, layout, dtype, implementation):
    return take(x, layout.tokens, implementation=implementation)


def _permute_forward(x, layout, dtype, implementation):
    return _permute(x, layout, dtype, implementation), layout


def _permute_backward(dtype, implementation, layout, gradient):
    grad_x = combine(gradient, layout.slots, dtype=dtype, implementation=implementation)
    return grad_x, None


_permute.defvjp(_permute_forward, _permute_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sum(rows, layout, dtype, implementation):
    return combine(rows, layout.slots, dtype=dtype, implementation=implementation)


def _sum_forward(rows, layout, dtype, implementation):
    return _sum(rows, layout, dtype, implementation), layout


def _sum_backward(dtype, implementation, layout, gradient):
    return take(gradient, layout.tokens, implementation=implementation), None


_sum.defvjp(_sum_forward, _sum_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _weighted(rows, layout, probs, implementation):
    return combine(rows, layout.slots, probs, dtype=rows.dtype, implementation=implementation)


def _weighted_forward(rows, layout, probs, implementation):
    return _weighted(rows, layout, probs, implementation), (rows, layout, probs)


def _weighted_backward(implementation, residuals, gradient):
    rows, layout, probs = residuals
    grad_rows, grad_probs = combine_gradients(
        rows, gradient, layout.slots, layout.assignments, probs, implementation=implementation
    )
    return grad_rows, None, grad_probs.astype(probs.dtype)


_weighted.defvjp(_weighted_forward, _weighted_backward)
