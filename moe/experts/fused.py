"""Experts by kernels with SwiGLU fused into the grouped GEMMs ("mosaic_fused")."""

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.experts.gated import gated
from moe.experts.grouped.mosaic import demand_service
from moe.kernels import grouped
from moe.kernels.swiglu import hidden_gradients, hidden_units
from moe.remat import PRODUCT
from sharding.collectives import match_varying

FUSED, GATHERED, SCATTERED = IN_ONE = ("mosaic_fused", "mosaic_gathered", "mosaic_scattered")
"""Names in addition to `moe.experts.grouped.dot.IMPLEMENTATIONS`: products with fused SwiGLU, those
that also gather their rows (`moe.experts.gathered`), and those that scatter them too."""


def moves_of(product: str | None) -> str | None:
    """Implementation of the permutation (`moe.kernels.choice`) for one of the products: kernels
    together with kernels."""
    return "mosaic" if product in ("mosaic", *IN_ONE) else None


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

    The reference implementation is `gated` between two `moe.experts.grouped.dot.grouped_dot`. Gate
    and up are saved for the backward pass, which recomputes hidden units from them.

    Args:
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels do not support the call, as "mosaic" of `grouped_dot`.
    """
    for width in gate_up.shape[-1], down.shape[-1]:
        demand_service(rows, width, FUSED, "routed_experts")
    return _fused(*match_varying((rows, gate_up, down, probs, sizes)), simulated)


def matrices_of(weights: Array, rows: Array) -> Array:
    """Weights cast to the dtype of the rows, with their columns flattened to one dimension."""
    return weights.astype(rows.dtype).reshape(*weights.shape[:2], -1)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _fused(rows, gate_up, down, probs, sizes, simulated):
    return _forward(rows, gate_up, down, probs, sizes, simulated)[0]


def _forward(rows, gate_up, down, probs, sizes, simulated):
    options = {"simulated": simulated}
    hidden, inward = hidden_units(rows, matrices_of(gate_up, rows), probs, sizes, **options)
    out = grouped.each(0, hidden, matrices_of(down, rows), sizes, **options)
    inward = checkpoint_name(inward, PRODUCT)
    return out, (rows, inward, gate_up, down, probs, sizes)


def _backward(simulated, residuals, gradient):
    rows, inward, gate_up, down, probs, sizes = residuals
    options = {"simulated": simulated}
    by_inward, by_probs = hidden_gradients(
        gradient, matrices_of(down, rows), inward, probs, sizes, **options
    )
    by_down = grouped.summed(gated(inward, probs), gradient, sizes, **options)
    by_rows = grouped.each(1, by_inward, matrices_of(gate_up, rows), sizes, **options)
    by_gate_up = grouped.summed(rows, by_inward, sizes, **options)
    return (
        by_rows,
        by_gate_up.astype(gate_up.dtype).reshape(gate_up.shape),
        by_down.astype(down.dtype),
        by_probs,
        None,
    )


_fused.defvjp(_forward, _backward)
