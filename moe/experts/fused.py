"""Experts by kernels with SwiGLU fused into the grouped GEMMs ("mosaic_fused")."""

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.experts.gated import apply_gate
from moe.experts.grouped.groups import cast_matrices
from moe.experts.grouped.mosaic import require_support
from moe.kernels import grouped
from moe.kernels.swiglu import hidden_gradients, hidden_units
from moe.remat import PRODUCT
from sharding.collectives import match_varying

FUSED, GATHERED, SCATTERED = FUSED_KERNELS = ("mosaic_fused", "mosaic_gathered", "mosaic_scattered")
"""Names in addition to `moe.experts.grouped.dot.IMPLEMENTATIONS`: products with fused SwiGLU, those
that also gather their rows (`moe.experts.gathered`), and those that scatter them too."""


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

    The reference implementation is `apply_gate` between two `moe.experts.grouped.dot.grouped_dot`.
    Gate and up are saved for the backward pass, which recomputes hidden units from them.

    Args:
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels do not support the call, as "mosaic" of `grouped_dot`.
    """
    for width in gate_up_weights.shape[-1], down_weights.shape[-1]:
        require_support(rows, width, FUSED, "routed_experts")
    return _fused(*match_varying((rows, gate_up_weights, down_weights, probs, sizes)), simulated)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _fused(rows, gate_up_weights, down_weights, probs, sizes, simulated):
    return _forward(rows, gate_up_weights, down_weights, probs, sizes, simulated)[0]


def _forward(rows, gate_up_weights, down_weights, probs, sizes, simulated):
    options = {"simulated": simulated}
    hidden, gate_up = hidden_units(
        rows, cast_matrices(gate_up_weights, rows), probs, sizes, **options
    )
    out = grouped.multiply_rows(0, hidden, cast_matrices(down_weights, rows), sizes, **options)
    gate_up = checkpoint_name(gate_up, PRODUCT)
    return out, (rows, gate_up, gate_up_weights, down_weights, probs, sizes)


def _backward(simulated, residuals, grad_out):
    rows, gate_up, gate_up_weights, down_weights, probs, sizes = residuals
    options = {"simulated": simulated}
    grad_gate_up, grad_probs = hidden_gradients(
        grad_out, cast_matrices(down_weights, rows), gate_up, probs, sizes, **options
    )
    grad_down = grouped.sum_products(apply_gate(gate_up, probs), grad_out, sizes, **options)
    grad_rows = grouped.multiply_rows(
        1, grad_gate_up, cast_matrices(gate_up_weights, rows), sizes, **options
    )
    grad_gate_up_weights = grouped.sum_products(rows, grad_gate_up, sizes, **options)
    return (
        grad_rows,
        grad_gate_up_weights.astype(gate_up_weights.dtype).reshape(gate_up_weights.shape),
        grad_down.astype(down_weights.dtype),
        grad_probs,
        None,
    )


_fused.defvjp(_forward, _backward)
