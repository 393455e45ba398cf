"""Tokens travel to the devices that hold their experts, and back.

Experts are spread over ``ep`` and the hidden units of each over ``etp``; a device's tokens are its
own whatever attention made of them. Three dispatchers, one file each: `all_to_all` (tokens go where
their experts are), `all_gather` (all tokens go everywhere) and `ragged` (tokens go in slices as
long as they are; no CPU). A token goes to a device once, however many of its experts are there, and
one sum comes back.

Buffers have static shapes: by default they hold any routing, so that the result never depends on
how even it is (Megatron's dropless); with a capacity they shrink to what it lets through. With a
`buffer_factor` they hold that many times what even routing sends. What finds no room adds nothing
and is counted: the sum over devices and layers tells whether a result is that of the routing, and
who asks for smaller buffers must look at it and compute again where it is not 0.

What is rounded to the dtype of the tokens: a row after each of its two products, its hidden units
after they were multiplied by the prob in float32. The rows of a token on one device are added up in
float32. Between devices "all_gather" adds up these float32 sums; the others round them once for the
way back and add them up in float32 again. The whole is rounded once. What ``etp`` adds up on the
way are parts of one product, of the dtype of the tokens as over ``tp``.
"""

from dataclasses import replace
from functools import partial

from jaxtyping import Array, Float, Int

from moe.architecture.activation import Activation
from moe.experts.dispatch.all_gather import all_gather_dispatch
from moe.experts.dispatch.all_to_all import all_to_all_dispatch
from moe.experts.dispatch.buffers import peer_tokens
from moe.experts.dispatch.cost import Exchange, cheapest, peer_capacity_of
from moe.experts.dispatch.ragged import ragged_dispatch
from moe.experts.dispatch.token_chunks import chunk_sizes, in_token_chunks
from moe.router.routing import Routing, without_repeats
from moe.weights import Experts
from sharding.folding import FoldedMesh
from sharding.planner.volumes import token_exchange

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
    buffer_factor: float | None = None,
    chunks: int = 1,
    exchange_rate: float | None = None,
    wire: str | None = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """``sum_k p_k expert_k(x)`` for this device's tokens.

    Communication: `rows_received` for the tokens of each chunk, times ``d_model``, and the small
    arrays that each implementation names.

    Args:
      weights: the experts of this device.
      x: normalised tokens of this device.
      routing: where they go, over the experts of all devices. Any will do: an expert that a token
        has twice is sent one row, with the sum of the probs.
      capacity: choices that `routing` sends from one device to one expert at most; None when
        nothing was dropped. What it sends beyond that adds nothing to the result.
      implementation: "all_to_all", "all_gather" or "ragged"; None takes the one whose collectives
        take least time (`moe.experts.dispatch.cost`).
      product: how the rows are multiplied, see `moe.experts.feed_forward.routed_experts`; where by
        kernels, kernels lay out and sum what travels too.
      buffer_factor: rows that a device computes at most, as a multiple of those of even routing
        (`moe.experts.dispatch.buffers.buffer_rows`); None is room for any routing.
      chunks: parts that the tokens go in, one beside the other
        (`moe.experts.dispatch.token_chunks`). Each has buffers of its own size.
      exchange_rate: of an all-to-all as a part of a ring's (`moe.experts.dispatch.cost.Exchange`).
      wire: "float8_e4m3fn" sends tokens, sums and their gradients in a byte an element
        (`sharding.activation_wire`); None as they are. The routing is sent as it is.
      activation: of the experts, see `moe.experts.gated.activated`.

    Returns:
      The sums, and how many choices found no room at this device, as sender or as receiver; 0
      without a `buffer_factor`, as long as `capacity` tells the truth. With any at some device the
      sums are not those of the routing.

    Raises:
      ValueError: on an unknown name, and for "ragged" on CPU devices.
    """
    name, num_local = implementation, weights.down.shape[0]
    if name is None:
        (num_tokens, k), ep = routing.experts.shape, mesh.size(mesh.ep)
        peer_capacity = peer_capacity_of(k, ep, None, buffer_factor)
        if capacity is not None:
            peer_capacity = min(
                peer_capacity, capacity * num_local / chunk_sizes(num_tokens, chunks)[0]
            )
        sizes = num_local * ep, k, x.shape[1], x.dtype.itemsize
        name = cheapest(Exchange(*sizes, peer_capacity, exchange_rate, wire), mesh)
    check_dispatch(name, mesh)
    # Buffers count on it; a replayed routing may name an expert twice.
    routing = without_repeats(routing, num_local * mesh.size(mesh.ep))
    send = partial(
        IMPLEMENTATIONS[name],
        mesh=mesh,
        capacity=capacity,
        product=product,
        buffer_factor=buffer_factor,
        wire=wire,
        activation=activation,
    )
    return in_token_chunks(send, chunks, weights, x, routing, mesh)


def rows_received(
    implementation: str,
    num_tokens: int,
    k: int,
    num_local: int,
    mesh: FoldedMesh,
    capacity: int | None = None,
    buffer_factor: float | None = None,
) -> int:
    """Rows of ``d_model`` numbers that one device receives per layer in the forward pass.

    With ``n = ep etp`` devices that share experts, T local tokens and `peer_tokens` R from one
    device to another:

    * "all_to_all": ``2 R (ep - 1)`` over ``ep`` and ``2 R ep (etp - 1)`` over ``etp``, together
      ``2 R (n - 1)``;
    * "all_gather": ``2 T (n - 1)``, whatever k is;
    * "ragged": at most as much as "all_to_all" and with even routing ``2 T k (ep - 1) / ep`` or
      less over ``ep``; over ``etp`` it is the same. What is given here is the bound.

    The backward pass moves as much again, and half of that once more where tokens are not kept for
    it (`moe.remat`). In half precision the sums of "all_gather", forward and backward, travel as
    float32, twice as wide as what is counted here.
    """
    sizes = num_tokens, k, num_local, mesh, capacity, buffer_factor
    bound = "all_to_all" if implementation == "ragged" else implementation
    given = bound, num_tokens, peer_tokens(*sizes), k, mesh.layout
    sent = token_exchange(*given, d_model=1, itemsize=1)
    # Of tokens of one element, whatever its width.
    return round(sum(replace(one, itemsize=1).sent(mesh.layout) for one in sent))


def check_dispatch(name: str, mesh: FoldedMesh) -> None:
    """Refuses a dispatcher that is none, or that such devices do not have.

    Raises:
      ValueError: on an unknown name, and for "ragged" on CPU devices.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"dispatch={name!r} is none of {', '.join(IMPLEMENTATIONS)}; None picks.")
    # A mesh of absent devices may stand for any platform: it is lowered without asking.
    if name == "ragged" and mesh.platform == "cpu":
        raise ValueError(
            'dispatch="ragged" needs jax.lax.ragged_all_to_all, which CPU devices do not have: '
            'use "all_to_all", "all_gather" or None.'
        )
