"""Both products of experts as kernels that have SwiGLU between them in them ("mosaic_fused"), and
the same that read tokens where they lie ("mosaic_gathered")."""

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float, Int

from moe.experts.gated import gated
from moe.experts.grouped.mosaic import demand_service
from moe.kernels import grouped
from moe.kernels.layout import SortedLayout
from moe.kernels.rows import combine
from moe.kernels.swiglu import hidden_gradients, hidden_units
from moe.remat import PRODUCT
from sharding.collectives import vary, varying

FUSED, GATHERED = "mosaic_fused", "mosaic_gathered"
"""Their names beside those of `moe.experts.grouped.dot.IMPLEMENTATIONS`."""


def moves_of(product: str | None) -> str | None:
    """What moves rows that are multiplied so (`moe.kernels.choice`): kernels beside kernels."""
    return "mosaic" if product in ("mosaic", FUSED, GATHERED) else None


def fused_experts(
    rows: Float[Array, "row d_model"],
    gate_up: Float[Array, "expert d_model half d_expert"],
    down: Float[Array, "expert d_expert d_model"],
    probs: Float[Array, "row"],
    sizes: Int[Array, "expert"],
    *,
    simulated: bool = False,
) -> Float[Array, "row d_model"]:
    """``((silu(x G) * x U) p) D`` for rows sorted by expert; zeros for rows of none.

    The plain twin is `gated` between two of `moe.experts.grouped.dot.grouped_dot`. Gate and up are
    kept for the backward pass, hidden units are made of them again.

    Args:
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels cannot serve, as "mosaic" of `grouped_dot`.
    """
    for width in gate_up.shape[-1], down.shape[-1]:
        demand_service(rows, width, FUSED, "routed_experts")
    operands = rows, gate_up, down, probs, sizes, None
    return _fused(*_varying(operands), rows.dtype, rows.dtype, simulated)


def gathered_experts(
    x: Float[Array, "token d_model"],
    layout: SortedLayout,
    gate_up: Float[Array, "expert d_model half d_expert"],
    down: Float[Array, "expert d_expert d_model"],
    probs: Float[Array, "slot"],
    sizes: Int[Array, "expert"],
    *,
    dtype: DTypeLike | None = None,
    simulated: bool = False,
) -> Float[Array, "slot d_model"]:
    """`fused_experts` of the tokens in the slots of a layout, which are nowhere copied there.

    The first product and the gradient of its matrices read each token through the layout, as often
    as it has slots. The gradient of a token is the sum over its slots, float32, in the order of its
    choices. The plain twin is `fused_experts` of `moe.experts.permutation.spread_rows`.

    Args:
      sizes: slots of each expert in the layout.
      dtype: in which the products are computed; None is that of `x`.
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels cannot serve, as "mosaic" of `grouped_dot`.
    """
    dtype = x.dtype if dtype is None else dtype
    for width in gate_up.shape[-1], down.shape[-1]:
        demand_service(jax.ShapeDtypeStruct(x.shape, dtype), width, GATHERED, "routed_experts")
    operands = x, gate_up, down, probs, sizes, layout
    return _fused(*_varying(operands), x.dtype, dtype, simulated)


def _varying(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    axes = tuple(frozenset().union(*map(varying, jax.tree.leaves(operands))))
    return vary(operands, axes)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _fused(x, gate_up, down, probs, sizes, layout, given, dtype, simulated):
    return _forward(x, gate_up, down, probs, sizes, layout, given, dtype, simulated)[0]


def _matrices(weights: Array, rows: Array) -> Array:
    return weights.astype(rows.dtype).reshape(*weights.shape[:2], -1)


def _source(layout: SortedLayout | None) -> Array | None:
    return None if layout is None else layout.tokens


def _forward(x, gate_up, down, probs, sizes, layout, given, dtype, simulated):
    rows, source = x.astype(dtype), _source(layout)
    options = {"simulated": simulated}
    hidden, inward = hidden_units(
        rows, _matrices(gate_up, rows), probs, sizes, source=source, **options
    )
    out = grouped.each(0, hidden, _matrices(down, rows), sizes, **options)
    inward = checkpoint_name(inward, PRODUCT)
    return out, (x, inward, gate_up, down, probs, sizes, layout)


def _backward(given, dtype, simulated, residuals, gradient):
    x, inward, gate_up, down, probs, sizes, layout = residuals
    rows, source = x.astype(dtype), _source(layout)
    options = {"simulated": simulated}
    by_inward, by_probs = hidden_gradients(
        gradient, _matrices(down, rows), inward, probs, sizes, **options
    )
    by_down = grouped.summed(gated(inward, probs), gradient, sizes, **options)
    by_rows = grouped.each(1, by_inward, _matrices(gate_up, rows), sizes, **options)
    by_gate_up = grouped.summed(rows, by_inward, sizes, source=source, **options)
    if layout is not None:
        name = "interpreted" if simulated else "mosaic"
        by_rows = combine(by_rows, layout.places, dtype=given, implementation=name)
    return (
        by_rows,
        by_gate_up.astype(gate_up.dtype).reshape(gate_up.shape),
        by_down.astype(down.dtype),
        by_probs,
        None,
        None,
    )


_fused.defvjp(_forward, _backward)
