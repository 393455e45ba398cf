"""Experts whose products read tokens, and what pulls at their sums, where they lie.

`moe.experts.fused` between `spread_rows` and `sum_rows`, without what these write: the first
product and the gradient of its matrices gather tokens through the layout ("mosaic_gathered"). What
pulls at a row of the second product is what pulls at the sum of its token, as the prob has
multiplied before; so its gradients gather that. Rows of the second product, and gradients of those
of the first, are summed for each token. They stand in the order of experts until then or
("mosaic_scattered") one choice of a token after the other, each in a place of its own, and are
added in the same order with the same bits.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float, Int

from moe.experts.fused import GATHERED, SCATTERED, matrices_of
from moe.experts.gated import gated
from moe.experts.grouped.mosaic import demand_service
from moe.kernels import grouped
from moe.kernels.layout import SortedLayout
from moe.kernels.rows import combine
from moe.kernels.swiglu import hidden_gradients, hidden_units
from moe.remat import PRODUCT
from sharding.collectives import alike


def gathered_experts(
    x: Float[Array, "token d_model"],
    layout: SortedLayout,
    gate_up: Float[Array, "expert d_model half d_expert"],
    down: Float[Array, "expert d_expert d_model"],
    probs: Float[Array, "slot"],
    sizes: Int[Array, "expert"],
    *,
    scattered: bool = False,
    dtype: DTypeLike | None = None,
    simulated: bool = False,
) -> Float[Array, "token d_model"]:
    """``sum_k ((silu(x G) * x U) p_k) D`` over the slots of each token, float32, in the order of
    its choices.

    The plain twin is `fused_experts` between `spread_rows` and `sum_rows`
    (`moe.experts.permutation`).

    Args:
      layout: of the tokens' choices.
      probs: of the choice in each slot.
      sizes: slots of each expert in the layout.
      scattered: rows are written each to the place of its choice, ``token * k + column``, in an
        array of as many as there are choices, however few have a slot.
      dtype: in which the products are computed, and rows rounded; None is that of `x`.
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels cannot serve, as "mosaic" of `grouped_dot`.
    """
    dtype = x.dtype if dtype is None else dtype
    name = SCATTERED if scattered else GATHERED
    for width in gate_up.shape[-1], down.shape[-1]:
        demand_service(jax.ShapeDtypeStruct(x.shape, dtype), width, name, "routed_experts")
    operands = alike((x, gate_up, down, probs, sizes, layout))
    return _gathered(*operands, _How(x.dtype, dtype, scattered, simulated))


class _How(NamedTuple):
    """`gathered_experts`' options, and the dtype that tokens are given in."""

    given: DTypeLike
    dtype: DTypeLike
    scattered: bool
    simulated: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"simulated": self.simulated}


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _gathered(x, gate_up, down, probs, sizes, layout, how):
    return _forward(x, gate_up, down, probs, sizes, layout, how)[0]


def _forward(x, gate_up, down, probs, sizes, layout, how):
    rows = x.astype(how.dtype)
    hidden, inward = hidden_units(
        rows, matrices_of(gate_up, rows), probs, sizes, source=layout.tokens, **how.options
    )
    out = _sums(0, hidden, matrices_of(down, rows), sizes, layout, how, jnp.float32)
    inward = checkpoint_name(inward, PRODUCT)
    return out, (x, inward, gate_up, down, probs, sizes, layout)


def _backward(how, residuals, gradient):
    x, inward, gate_up, down, probs, sizes, layout = residuals
    rows, pull, source = x.astype(how.dtype), gradient.astype(how.dtype), layout.tokens
    by_inward, by_probs = hidden_gradients(
        pull, matrices_of(down, rows), inward, probs, sizes, source=source, **how.options
    )
    by_down = grouped.summed(
        gated(inward, probs), pull, sizes, source=source, gathered=1, **how.options
    )
    by_x = _sums(1, by_inward, matrices_of(gate_up, rows), sizes, layout, how, how.given)
    by_gate_up = grouped.summed(rows, by_inward, sizes, source=source, **how.options)
    return (
        by_x,
        by_gate_up.astype(gate_up.dtype).reshape(gate_up.shape),
        by_down.astype(down.dtype),
        by_probs,
        None,
        None,
    )


_gathered.defvjp(_forward, _backward)


def _sums(
    side: int,
    rows: Array,
    matrices: Array,
    sizes: Array,
    layout: SortedLayout,
    how: _How,
    dtype: DTypeLike,
) -> Array:
    """The product of the rows in the slots, and of each token the sum over its slots."""
    places = layout.places
    to: dict[str, Any] = {}
    if how.scattered:
        to = {"destination": layout.choices, "num_results": places.size}
        # A choice without a slot is written nowhere, and left out.
        choice = jnp.arange(places.size, dtype=places.dtype).reshape(places.shape)
        places = jnp.where(places < rows.shape[0], choice, places.size)
    products = grouped.each(side, rows, matrices, sizes, **to, **how.options)
    name = "interpreted" if how.simulated else "mosaic"
    return combine(products, places, dtype=dtype, implementation=name)
