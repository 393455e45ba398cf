"""Permutation of rows to the order of their groups and back, by sorts and gathers without
scatter-adds."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Shaped

from moe.kernels.rows import combine, take
from sharding.collectives import match_varying


def permutation_kernel(product: str | None) -> str | None:
    """Implementation of the permutation (`moe.kernels.choice`) beside one of the grouped GEMMs:
    kernels together with kernels."""
    return "mosaic" if product == "mosaic" else None


def permute_rows(
    x: Shaped[Array, "row *rest"],
    source: Int[Array, "slot"],
    slots: Int[Array, "row k"],
    dtype: Any = None,
    implementation: str | None = None,
) -> Shaped[Array, "slot *rest"]:
    """Permute: gathers ``x[source]``, zeros where the index is past the end, in `dtype` (None: that
    of `x`).

    The gradient of a row is the sum over its slots, in float32, by a gather: XLA would use a
    scatter-add, whose order varies.

    Args:
      source: index of the row of each slot.
      slots: indices of the slots of each row, past the end for none; the inverse of `source`.
      implementation: of forward and backward, see `moe.kernels.choice`; scalars are "plain".
    """
    dtype = x.dtype if dtype is None else dtype
    return _permute(*match_varying((x, source, slots)), x.dtype, dtype, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _permute(x, source, slots, input_dtype, dtype, implementation):
    return take(x.astype(dtype), source, implementation=implementation)


def _permute_forward(x, source, slots, input_dtype, dtype, implementation):
    return _permute(x, source, slots, input_dtype, dtype, implementation), slots


def _permute_backward(input_dtype, dtype, implementation, slots, gradient):
    return combine(gradient, slots, dtype=input_dtype, implementation=implementation), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def unpermute_rows(
    x: Float[Array, "slot *rest"],
    slots: Int[Array, "row k"],
    source: Int[Array, "slot"],
    implementation: str | None = None,
) -> Float[Array, "row *rest"]:
    """Unpermute: sums the slots of each row, float32, in the order of `slots`.

    The reverse of `permute_rows`, and its gradient; arguments as there.
    """
    return _sum(*match_varying((x, slots, source)), x.dtype, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _sum(x, slots, source, input_dtype, implementation):
    return combine(x, slots, implementation=implementation)


def _sum_forward(x, slots, source, input_dtype, implementation):
    return _sum(x, slots, source, input_dtype, implementation), source


def _sum_backward(input_dtype, implementation, source, gradient):
    return take(gradient.astype(input_dtype), source, implementation=implementation), None, None


_sum.defvjp(_sum_forward, _sum_backward)
