"""Grouped GEMM by XLA's `ragged_dot_general`, in its two forms ("ragged_dot")."""

import jax.numpy as jnp
from jax import lax


def ragged_multiply(side, rows, weights, sizes):
    dimensions = lax.RaggedDotDimensionNumbers((((1,), (1 + side,)), ((), ())), [0], [0])
    out = lax.ragged_dot_general(
        rows, weights, sizes, dimensions, preferred_element_type=jnp.float32
    )
    return out.astype(rows.dtype)


_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def ragged_sum(rows, others, sizes):
    in_group = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
    rows, others = jnp.where(in_group, rows, 0), jnp.where(in_group, others, 0)
    return lax.ragged_dot_general(
        rows, others, sizes, _CONTRACT_ROWS, preferred_element_type=jnp.float32
    )
