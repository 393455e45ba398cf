"""Experts whose grouped GEMMs gather tokens and output gradients themselves ("mosaic_gathered").

It is `moe.experts.fused` between `spread_rows` and `sum_rows`, without the arrays that these write:
the gate/up product and the gradient of its matrices gather tokens through the layout. The gradient
of a row of the down-projection is its token's output gradient, as the gate weight was applied
before; so the backward pass gathers that. Rows of the down-projection, and gradients of the rows of
the gate/up product, are summed for each token. Until then they are in the order of experts or, with
"mosaic_scattered", in the order of tokens and expert ids, each in a slot of its own. The order of
the sum, and so every bit, is the same.
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
from sharding.collectives import match_varying


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
    its expert ids.

    The reference implementation is `fused_experts` between `spread_rows` and `sum_rows`
    (`moe.experts.permutation`).

    Args:
      layout: sorted layout of the tokens' expert ids.
      probs: gate weight of each slot.
      sizes: number of slots of each expert in the layout.
      scattered: each row is written to index ``token * k + column`` of an array with ``tokens * k``
        rows, however few of them have a slot.
      dtype: of the products and of their rounded rows; None is that of `x`.
      simulated: see `moe.kernels.mosaic.launch`.

    Raises:
      ValueError: where the kernels do not support the call, as "mosaic" of `grouped_dot`.
    """
    dtype = x.dtype if dtype is None else dtype
    name = SCATTERED if scattered else GATHERED
    for width in gate_up.shape[-1], down.shape[-1]:
        demand_service(jax.ShapeDtypeStruct(x.shape, dtype), width, name, "routed_experts")
    operands = match_varying((x, gate_up, down, probs, sizes, layout))
    return _gathered(*operands, _How(x.dtype, dtype, scattered, simulated))


class _How(NamedTuple):
    """Static options of `gathered_experts`, and the dtype of the tokens."""

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
    """Grouped product of the rows in the slots, summed over the slots of each token."""
    places = layout.places
    to: dict[str, Any] = {}
    if how.scattered:
        to = {"destination": layout.choices, "num_results": places.size}
        # Expert ids without a slot are not written, so the sum must skip them.
        choice = jnp.arange(places.size, dtype=places.dtype).reshape(places.shape)
        places = jnp.where(places < rows.shape[0], choice, places.size)
    products = grouped.each(side, rows, matrices, sizes, **to, **how.options)
    name = "interpreted" if how.simulated else "mosaic"
    return combine(products, places, dtype=dtype, implementation=name)
