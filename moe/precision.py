"""Products that are float32 on every device, forward and backward.

By default a GPU or a TPU shortens the float32 factors of a product (to TF32, to bfloat16): enough
to change which experts a token takes, and what its value is.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def float32_product(
    a: Float[Array, "*token inner"], b: Float[Array, "inner *outer"]
) -> Float[Array, "..."]:
    """``a b`` of float32 arrays, no digit of theirs left out."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def weighted_sum(
    weights: Float[Array, "token k"], rows: Float[Array, "token k width"]
) -> Float[Array, "token width"]:
    """``sum_k w_k rows_k``, float32 from the weights to the sum, which the caller rounds."""
    rows = rows.astype(jnp.float32)
    return jnp.einsum("nk,nkd->nd", weights, rows, precision=jax.lax.Precision.HIGHEST)
