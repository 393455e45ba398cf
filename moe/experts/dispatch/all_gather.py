"""All-gather token dispatcher: all tokens are sent to every device of the expert-parallel group;
each computes its local experts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.experts.dispatch.buffers import (
    DispatchOptions,
    buffer_rows,
    local_assignments,
    mask_replicated_bias,
)
from moe.experts.feed_forward import routed_experts
from moe.remat import DISPATCHED
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import gather_and_widen, gather_tokens, scatter_and_round
from sharding.compression import gather_fp8, scatter_fp8


def all_gather_dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    options: DispatchOptions,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """All-gathers tokens and routing over ``ep x etp``, sums the outputs of the local experts, and
    reduce-scatters the sums.

    Communication per device and layer, forward, with ``n = ep etp`` and T local tokens: ``T d_model
    (n - 1)`` elements out and as many back in float32, for any k, and ``2 T k (n - 1)`` numbers of
    routing out; backward the same. It is the fastest for large k.

    References:
      Jin et al., "MegaScale-MoE", 2025, section 3.2. https://arxiv.org/abs/2505.11432
    """
    mesh, comm_dtype, num_local = options.mesh, options.comm_dtype, weights.down.shape[0]
    group = *mesh.ep, *mesh.etp
    num_tokens, k = routing.experts.shape
    # In float32 from here: a token's gradient is a sum over devices, rounded once at its own.
    dtype = x.dtype
    if comm_dtype is None:
        x = gather_and_widen(x, group, DISPATCHED)
    else:
        x = gather_fp8(x, group, jnp.float32, DISPATCHED)
    experts, probs = (gather_tokens(array, group) for array in routing)
    sums, overflow = routed_experts(
        mask_replicated_bias(weights, mesh),
        x,
        *local_assignments(experts, probs, num_local, mesh),
        num_rows=buffer_rows(
            num_tokens, k, num_local, mesh, options.capacity, options.buffer_factor
        ),
        dtype=dtype,
        implementation=options.product,
        activation=options.activation,
    )
    scatter = scatter_and_round if comm_dtype is None else scatter_fp8
    return scatter(sums, group, dtype), overflow
