"""Gradient communication in bfloat16 with float32 sums: half the bytes of a float32 reduce-scatter.

A ring that reduces in bfloat16 rounds the running sum at each of its ``n - 1`` steps, so that its
error grows with the number of devices. Here each device rounds its terms once, an all-to-all sends
the terms of a shard to the device that keeps it, and that device sums them in float32.

References:
  Jin et al., "MegaScale-MoE", 2025, on communication compression (gradients accumulated in float32,
  cast once, sent by all-to-all within a data-parallel group, summed in float32).
  https://arxiv.org/abs/2505.11432
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from sharding.collectives import Axes


def compressed_reduce_scatter(
    x: Float[Array, "*whole"], axes: Axes, dim: int
) -> Float[Array, "*shard"]:
    """Reduce-scatter over `axes` of terms rounded to bfloat16 and summed in float32.

    Each device keeps its shard of the dimension `dim` of ``sum_i bf16(x_i)``, added up in the order
    of the devices, so that the same terms give the same bits. It equals `jax.lax.psum_scatter` for
    terms that bfloat16 represents exactly. Of others each element is off by at most
    ``2^-8 sum_i |x_i|``, on up to 2^8 devices the rounding of the float32 sums included, and for
    numbers in float32's normal range. A term beyond bfloat16's largest number becomes infinite.

    Volume sent, of an array of G elements: ``G (n-1)/n`` of two bytes.

    Args:
      x: of this device, float32; `dim` divides by the devices.
    """
    n = lax.axis_size(axes)
    terms = x.astype(jnp.bfloat16).reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])
    terms = lax.all_to_all(terms, axes, split_axis=dim, concat_axis=dim, tiled=True)

    def term(i):
        return lax.dynamic_index_in_dim(terms, i, dim, keepdims=False).astype(jnp.float32)

    # The compiler may reorder a sum over the dimension; a loop has a defined order. Unrolled,
    # additions share a pass over memory; a full unroll would be a long program on many devices.
    return lax.fori_loop(1, n, lambda i, total: total + term(i), term(0), unroll=8)
