"""Tokens travel to the devices that hold their experts, and back.

Experts are spread over ``ep`` and the hidden units of each over ``etp``; a device's tokens are its
own whatever attention made of them. Three dispatchers, one file each: `all_to_all` (rows go where
their experts are), `all_gather` (all tokens go everywhere) and `ragged` (rows go in slices as long
as they are; no CPU). Buffers have static shapes: without a capacity they hold any routing, so the
result never depends on how even it is (Megatron's dropless); with one they shrink.

The probs of the experts' outputs and the sum over them are float32, on however many devices its
terms are, and the sum is rounded to the dtype of the tokens once. What ``etp`` adds up before that
are parts of one product, of that dtype as over ``tp``.
"""

import jax
from jaxtyping import Array, Float

from moe.experts.dispatch.all_gather import all_gather_dispatch
from moe.experts.dispatch.all_to_all import all_to_all_dispatch, peer_capacity
from moe.experts.dispatch.ragged import ragged_dispatch
from moe.router.routing import Routing, without_repeats
from moe.weights import Experts
from sharding.folding import FoldedMesh

IMPLEMENTATIONS = {
    "all_to_all": all_to_all_dispatch,
    "all_gather": all_gather_dispatch,
    "ragged": ragged_dispatch,
}


def dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    *,
    capacity: int | None = None,
    implementation: str | None = None,
    product: str | None = None,
) -> Float[Array, "local d_model"]:
    """``sum_k p_k expert_k(x)`` for this device's tokens.

    Communication: `rows_received`, times ``d_model``, and the small arrays that each implementation
    names.

    Args:
      weights: the experts of this device.
      x: normalised tokens of this device.
      routing: where they go, over the experts of all devices. Any will do: an expert that a token
        has twice is sent one row, with the sum of the probs.
      capacity: choices that `routing` sends from one device to one expert at most; None when
        nothing was dropped. What it sends beyond that adds nothing to the result.
      implementation: "all_to_all", "all_gather" or "ragged"; None takes the first unless the second
        moves less.
      product: how the rows are multiplied, see `moe.experts.grouped.dot.grouped_dot`.

    Raises:
      ValueError: on an unknown name, and for "ragged" on CPU devices.
    """
    name = implementation
    if name is None:
        num_tokens, k = routing.experts.shape
        name = best(num_tokens, k, weights.gate.shape[0], mesh, capacity)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"dispatch={name!r} is none of {', '.join(IMPLEMENTATIONS)}; None picks.")
    if name == "ragged":
        _refuse_cpu(mesh)
    # `peer_capacity` counts on it; a replayed routing may name an expert twice.
    routing = without_repeats(routing, weights.gate.shape[0] * mesh.size(mesh.ep))
    return IMPLEMENTATIONS[name](weights, x, routing, mesh, capacity, product)


def best(
    num_tokens: int, k: int, num_local: int, mesh: FoldedMesh, capacity: int | None = None
) -> str:
    """The implementation that moves less: "all_gather" where `rows_received` says so.

    With more than one device that is where ``R > T``: without a capacity as soon as ``min(k,
    experts per device) > 1``, because a buffer for any routing is larger than the tokens
    themselves; with one where ``capacity_factor k > ep``.

    References:
      Jin et al., "MegaScale-MoE", 2025, section 3.2 (large k gathers). https://arxiv.org/abs/2505.11432
    """
    sizes = num_tokens, k, num_local, mesh, capacity
    gathered, exchanged = (rows_received(name, *sizes) for name in ("all_gather", "all_to_all"))
    return "all_gather" if gathered < exchanged else "all_to_all"


def rows_received(
    implementation: str,
    num_tokens: int,
    k: int,
    num_local: int,
    mesh: FoldedMesh,
    capacity: int | None = None,
) -> int:
    """Rows of ``d_model`` numbers that one device receives per layer in the forward pass.

    With ``n = ep etp`` devices that share experts, T local tokens and a `peer_capacity` of ``R =
    min(T min(k, experts per device), C experts per device)`` choices from one device to another:

    * "all_to_all": ``2 R (ep - 1)`` over ``ep`` and ``2 R ep (etp - 1)`` over ``etp``, together
      ``2 R (n - 1)``;
    * "all_gather": ``2 T (n - 1)``, whatever k is;
    * "ragged": at most as much as "all_to_all" and with even routing ``2 T k (ep - 1) / ep`` over
      ``ep``; over ``etp`` it is the same. What is given here is the bound.

    The backward pass moves as much again. In half precision the sums of "all_gather", forward and
    backward, travel as float32, twice as wide as what is counted here.
    """
    devices = mesh.size(mesh.ep) * mesh.size(mesh.etp)
    rows = peer_capacity(num_tokens, k, num_local, capacity)
    return 2 * (devices - 1) * (num_tokens if implementation == "all_gather" else rows)


def _refuse_cpu(mesh: FoldedMesh) -> None:
    # An abstract mesh may stand for any platform: it is lowered without asking.
    real = mesh.mesh.devices.flat if isinstance(mesh.mesh, jax.sharding.Mesh) else ()
    if any(device.platform == "cpu" for device in real):
        raise ValueError(
            'dispatch="ragged" needs jax.lax.ragged_all_to_all, which CPU devices do not have: '
            'use "all_to_all", "all_gather" or None.'
        )
