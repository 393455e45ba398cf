"""Experts by kernels with SwiGLU fused into the grouped GEMMs.

With "mosaic_fused" rows are permuted before and after. With "mosaic_gathered" the products gather
tokens and output gradients themselves, without the arrays that `permute_rows` and `unpermute_rows`
write: the gate/up product and the gradient of its matrices gather tokens through the layout. The
gradient of a row of the down-projection is its token's output gradient, as the gate weight was
applied before; so the backward pass gathers that. Rows of the down-projection, and gradients of the
rows of the gate/up product, are summed for each token. Until then they are in the order of experts
or, with "mosaic_scattered", in the order of tokens and expert ids, each in a slot of its own. The
order of the sum, and so every bit, is the same.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float, Int

from moe.experts.gated import apply_gate
from moe.experts.grouped_dot import cast_matrices
from moe.kernels import grouped
from moe.kernels.layout import SortedLayout
from moe.kernels.rows import combine
from moe.kernels.swiglu import hidden_gradients, hidden_units
from moe.remat import PRODUCT
from sharding.collectives import match_varying

FUSED, GATHERED, SCATTERED = FUSED_KERNELS = ("mosaic_fused", "mosaic_gathered", "mosaic_scattered")
"""Names in addition to `moe.experts.grouped_dot.IMPLEMENTATIONS`: products with fused SwiGLU, those
that also gather their rows and those that scatter them too."""


def permutation_kernel(product: str | None) -> str | None:
    """Implementation of the permutation (`moe.kernels.choice`) for one of the products: kernels
    together with kernels."""
    return "mosaic" if product in ("mosaic", *FUSED_KERNELS) else None


def fused_experts(
    rows: Float[Array, "row d_model"],
    gate_up_weights: Float[Array, "expert d_model half d_expert"],
    down_weights: Float[Array, "expert d_expert d_model"],
    probs: Float[Array, "row"],
    sizes: Int[Array, "expert"],
    *,
    simulated: bool = False,
) -> Float[Array, "row d_model"]:
    """``((silu(x G) * x U) p) D`` for rows sorted by expert; zeros for rows of none.

    The reference implementation is `apply_gate` between two `moe.experts.grouped_dot.grouped_dot`.
    Gate and up are saved for the backward pass, which recomputes hidden units from them.

    Args:
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels do not support the call, as "mosaic" of `grouped_dot`.
    """
    operands = rows, gate_up_weights, down_weights, probs, sizes, None
    return _check_and_run(FUSED, operands, FusedOptions(rows.dtype, rows.dtype, False, simulated))


def gathered_experts(
    x: Float[Array, "token d_model"],
    layout: SortedLayout,
    gate_up_weights: Float[Array, "expert d_model half d_expert"],
    down_weights: Float[Array, "expert d_expert d_model"],
    probs: Float[Array, "slot"],
    *,
    scattered: bool = False,
    dtype: DTypeLike | None = None,
    simulated: bool = False,
) -> Float[Array, "token d_model"]:
    """``sum_k ((silu(x G) * x U) p_k) D`` over the slots of each token, float32, in the order of
    its expert ids.

    The reference implementation is `fused_experts` between `permute_rows` and `unpermute_rows`
    (`moe.experts.permutation`).

    Args:
      layout: sorted layout of the tokens' expert ids.
      probs: gate weight of each slot.
      scattered: each row is written to index ``token * k + column`` of an array with ``tokens * k``
        rows, however few of them have a slot.
      dtype: of the products and of their rounded rows; None is that of `x`.
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels do not support the call, as "mosaic" of `grouped_dot`.
    """
    sizes = jnp.diff(layout.stops, prepend=0)
    operands = x, gate_up_weights, down_weights, probs, sizes, layout
    options = FusedOptions(x.dtype, x.dtype if dtype is None else dtype, scattered, simulated)
    return _check_and_run(SCATTERED if scattered else GATHERED, operands, options)


class FusedOptions(NamedTuple):
    """Static options of the kernels, and the dtype of the tokens."""

    input_dtype: DTypeLike
    compute_dtype: DTypeLike
    scattered: bool
    simulated: bool


def _check_and_run(name: str, operands: tuple[Any, ...], options: FusedOptions) -> Array:
    x, *matrices = operands[:3]
    rows = jax.ShapeDtypeStruct(x.shape, options.compute_dtype)
    for weights in matrices:
        grouped.require_support(rows, weights.shape[-1], name, "routed_experts")
    return _experts(*match_varying(operands), options)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _experts(x, gate_up_weights, down_weights, probs, sizes, layout, options):
    return _forward(x, gate_up_weights, down_weights, probs, sizes, layout, options)[0]


def _forward(x, gate_up_weights, down_weights, probs, sizes, layout, options):
    rows = x.astype(options.compute_dtype)
    matrices = cast_matrices(gate_up_weights, rows)
    hidden, gate_up = hidden_units(rows, matrices, probs, sizes, **_gathering(layout, options))
    matrices = cast_matrices(down_weights, rows)
    out = _multiply_and_sum(0, hidden, matrices, sizes, layout, options, jnp.float32)
    gate_up = checkpoint_name(gate_up, PRODUCT)
    return out, (x, gate_up, gate_up_weights, down_weights, probs, sizes, layout)


def _backward(options, residuals, gradient):
    x, gate_up, gate_up_weights, down_weights, probs, sizes, layout = residuals
    rows, grad_out = x.astype(options.compute_dtype), gradient.astype(options.compute_dtype)
    how = _gathering(layout, options)
    grad_gate_up, grad_probs = hidden_gradients(
        grad_out, cast_matrices(down_weights, rows), gate_up, probs, sizes, **how
    )
    gathered = 0 if layout is None else 1
    grad_down = grouped.sum_products(
        apply_gate(gate_up, probs), grad_out, sizes, gathered=gathered, **how
    )
    matrices, dtype = cast_matrices(gate_up_weights, rows), options.input_dtype
    grad_x = _multiply_and_sum(1, grad_gate_up, matrices, sizes, layout, options, dtype)
    grad_gate_up_weights = grouped.sum_products(rows, grad_gate_up, sizes, **how)
    return (
        grad_x,
        grad_gate_up_weights.astype(gate_up_weights.dtype).reshape(gate_up_weights.shape),
        grad_down.astype(down_weights.dtype),
        grad_probs,
        None,
        None,
    )


_experts.defvjp(_forward, _backward)


def _gathering(layout: SortedLayout | None, options: FusedOptions) -> dict[str, Any]:
    """Options of a kernel that gathers the token of each row, if there is a layout."""
    source = None if layout is None else layout.tokens
    return {"source": source, "simulated": options.simulated}


def _multiply_and_sum(
    side: int,
    rows: Array,
    matrices: Array,
    sizes: Array,
    layout: SortedLayout | None,
    options: FusedOptions,
    dtype: DTypeLike,
) -> Array:
    """Grouped product of the rows and, with a layout, its sum over the slots of each token."""
    if layout is None:
        return grouped.multiply_rows(side, rows, matrices, sizes, simulated=options.simulated)
    slots, how = layout.slots, dict[str, Any](simulated=options.simulated)
    if options.scattered:
        how |= {"destination": layout.assignments, "num_results": slots.size}
        # Expert ids without a slot are not written, so the sum must skip them.
        assignment = jnp.arange(slots.size, dtype=slots.dtype).reshape(slots.shape)
        slots = jnp.where(slots < rows.shape[0], assignment, slots.size)
    products = grouped.multiply_rows(side, rows, matrices, sizes, **how)
    name = "interpreted" if options.simulated else "mosaic"
    return combine(products, slots, dtype=dtype, implementation=name)
