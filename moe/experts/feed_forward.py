"""Feed-forward layers: the dense one, and routed experts (MoE).

Expert ids are sorted, their rows multiplied by `grouped_dot`, and the results of each token summed.
`dense_reference` is the reference implementation.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.adapters import matmul, product
from moe.architecture.feed_forward import Activation
from moe.experts.gated import apply_activation, apply_gate
from moe.experts.grouped_dot import IMPLEMENTATIONS, LOOPS_AND_BATCHES, grouped_dot
from moe.experts.permutation import permutation_kernel, permute_rows, unpermute_rows
from moe.kernels.layout import sorted_layout
from moe.ops.sorting import positions_in
from moe.remat import PRODUCT
from moe.weights import Dense, Experts, Layer
from sharding.collectives import gather_tokens, match_varying, scatter_tokens
from sharding.folding import FoldedMesh


def flattened_dot(
    x: Float[Array, "token inner"], weights: Float[Array, "inner *outer"]
) -> Float[Array, "token columns"]:
    """``x @ W``, with the columns of ``W`` flattened in memory order.

    Weights are cast to the dtype of `x` at each use. The gradient equals autodiff's, but the
    residual is the weight as it is passed. Otherwise a cast and reshaped copy would be saved in
    addition, in a scan over layers one for every layer.
    """
    return _flattened_dot(*match_varying((x, weights)))


def _plain_flattened_dot(x, weights):
    return x @ weights.astype(x.dtype).reshape(weights.shape[0], -1)


_flattened_dot = jax.custom_vjp(_plain_flattened_dot)


def _flattened_dot_forward(x, weights):
    return _plain_flattened_dot(x, weights), (x, weights)


def _flattened_dot_backward(residuals, gradient):
    # The product itself is not wanted here, and not computed.
    return jax.vjp(_plain_flattened_dot, *residuals)[1](gradient)


_flattened_dot.defvjp(_flattened_dot_forward, _flattened_dot_backward)


def dense(
    weights: Dense[Array],
    x: Float[Array, "local d_model"],
    mesh: FoldedMesh,
    activation: Activation = "silu",
) -> Float[Array, "local d_model"]:
    """Dense layer ``(f(x G) * x U) D``, hidden units sharded over ``tp``; SwiGLU if f is "silu".

    Communication per device: one `gather_tokens` and one `scatter_tokens` over ``tp``.

    References:
      Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
    """
    x = gather_tokens(x, mesh.tp)
    # Gate and up have adapters of their own.
    gate_up = product(flattened_dot, x, weights.gate_up, _gate_up_lora_a, _gate_up_lora_b)
    gate, up = jnp.split(checkpoint_name(gate_up, PRODUCT), 2, axis=-1)
    hidden = apply_activation(gate, up, activation)
    return scatter_tokens(product(matmul, hidden, weights.down), mesh.tp)


def _gate_up_lora_a(x: Array, matrix: Array) -> Array:
    return jnp.einsum("nd,hdr->nhr", x, matrix)


def _gate_up_lora_b(narrow: Array, matrix: Array) -> Array:
    return jnp.einsum("nhr,hrf->nhf", narrow, matrix).reshape(narrow.shape[0], -1)


def dense_term(
    layer: Layer[Array],
    h: Float[Array, "local d_model"],
    mesh: FoldedMesh,
    activation: Activation = "silu",
) -> Float[Array, "local d_model"] | None:
    """Output of the dense layer for the normalised residual stream; it is the shared expert in a
    layer with routed experts. None if there is none."""
    if layer.dense is None:
        return None
    # Independent of the routed experts, so the two may overlap.
    with jax.named_scope("dense_expert"):
        out = dense(layer.dense, h, mesh, activation)
    if layer.shared_gate is not None:
        out = checkpoint_name(out, PRODUCT)
        out = out * jax.nn.sigmoid(h @ layer.shared_gate.astype(h.dtype))[:, None]
    return out


def routed_experts(
    weights: Experts[Array],
    x: Float[Array, "token d_model"],
    experts: Int[Array, "token k"],
    probs: Float[Array, "token k"],
    *,
    num_rows: int | None = None,
    dtype: Any = None,
    implementation: str | None = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "token d_model"], Int[Array, ""]]:
    """Routed experts: ``sum_k ((f(x G + g) * (x U + u)) p_k) D + p_k d`` over the expert ids of
    each token, float32.

    Each expert id of a token is a row of the two products. The gate weight multiplies before the
    second one, so that its result is not needed by the backward pass; it is rounded to the dtype of
    the rows and summed in float32.

    Args:
      weights: the experts, with the biases g, u and d that some have.
      experts: expert ids of each token, none of them twice; ``num_experts`` or more for none.
      probs: gate weights, float32.
      num_rows: capacity in rows; None is enough for every expert id.
      dtype: dtype of the rows and of the products; None is the dtype of `x`.
      implementation: of the products, see `moe.experts.grouped_dot.grouped_dot`. With "mosaic"
        kernels also sort, permute and sum the rows. Products with adapters are as narrow as their
        rank, and use the best implementation that applies.
      activation: f, see `moe.experts.gated.apply_activation`.

    Returns:
      The sums, and the number of expert ids beyond the capacity, which the sums do not contain.

    Raises:
      ValueError: on an unknown implementation, and where the kernels do not support the call.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"experts={implementation!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, "
            "or None for the best that applies."
        )
    num_rows = experts.size if num_rows is None else min(num_rows, experts.size)
    kernels = permutation_kernel(implementation)
    num_experts = weights.down.shape[0]
    layout = sorted_layout(experts, num_experts, num_slots=num_rows, implementation=kernels)
    # Rows are in the order of experts, so those beyond the capacity come last.
    stop = layout.stops
    overflow = jnp.sum(layout.sizes) - stop[-1]
    sizes = jnp.diff(stop, prepend=0)
    token, slots = layout.tokens, layout.slots
    row_probs = permute_rows(probs.reshape(-1), layout.assignments, slots.reshape(-1, 1))
    rows = permute_rows(x, token, slots, dtype, kernels)
    # One product for gate and up: wider products are faster than two narrow ones.
    # A token has an expert once: no expert has more rows than there are tokens.
    dot = partial(_multiply_groups, sizes, implementation, x.shape[0])
    # Kernels support no products as narrow as the rank of an adapter.
    plain = implementation if implementation in LOOPS_AND_BATCHES else None
    narrow = partial(_multiply_groups, sizes, plain, x.shape[0])
    gate_up = product(dot, rows, weights.gate_up, narrow, narrow)
    gate_up = checkpoint_name(gate_up, PRODUCT)
    if weights.gate_up_bias is not None:
        gate_up = gate_up + _gather_bias(weights.gate_up_bias, stop, gate_up)
    hidden = apply_gate(gate_up, row_probs, activation)
    out = product(dot, hidden, weights.down, narrow, narrow)
    if weights.down_bias is not None:
        bias = _gather_bias(weights.down_bias, stop, out).astype(jnp.float32)
        out = (out.astype(jnp.float32) + bias * row_probs[:, None]).astype(out.dtype)
    return unpermute_rows(out, slots, token, kernels), overflow


def _gather_bias(
    bias: Float[Array, "expert *width"], stop: Int[Array, "expert"], rows: Array
) -> Float[Array, "row columns"]:
    """Bias of each row's expert, zeros for rows of none; `stop` is one past its last row."""
    expert = positions_in(stop, jnp.arange(rows.shape[0], dtype=stop.dtype), "right")
    flat = bias.reshape(bias.shape[0], -1)
    return flat.at[expert].get(mode="fill", fill_value=0).astype(rows.dtype)


def _multiply_groups(
    sizes: Array, implementation: str | None, most: int, rows: Array, matrices: Array
) -> Array:
    return grouped_dot(rows, matrices, sizes, implementation=implementation, most=most)
