"""Token dispatch to the devices of the experts and combine of their outputs, by a chosen method.

Experts are sharded over ``ep`` and the hidden units of each over ``etp``; tokens keep the sharding
of the residual stream. Methods are `all_to_all` (tokens are sent to the devices of their experts),
`all_gather` (all tokens are sent everywhere), `ragged` (slices of dynamic length; not on CPU) and
`two_level` (to the servers of their experts, and there to the devices; with buffers or in slices).
A token is sent to a device once, however many of its experts are there, and one sum comes back.

Buffers have static shapes. By default they are large enough for any routing, so that the result
never depends on load balance (Megatron's dropless); with a capacity they shrink to what it admits.
With a `buffer_factor` they have that multiple of balanced load. Overflow contributes nothing and is
counted: if the sum over devices and layers is not 0, tokens are missing from the result, and the
caller must recompute it with larger buffers.

Rounded to the dtype of the tokens are: a row after each of its two products, and its hidden units
after the multiplication by the gate weight in float32. The rows of a token on one device are summed
in float32. Across devices "all_gather" sums these float32 sums; the others round them once for the
way back and sum them in float32 again, "two_level" once more in a server. The total is rounded
once. Sums over ``etp`` are partial sums of one product, in the dtype of the tokens, as over ``tp``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.architecture.feed_forward import Activation
from moe.execution import SLICES, TWO_LEVELS, Execution
from moe.experts.dispatch.all_to_all import all_gather_dispatch, exchange_tokens, one_level_dispatch
from moe.experts.dispatch.buffers import DispatchOptions, peer_tokens
from moe.experts.dispatch.cost import TokenExchange, cheapest, peer_capacity_of
from moe.experts.dispatch.ragged import exchange_slices
from moe.experts.dispatch.two_level import expert_servers, two_level_dispatch
from moe.ops.precision import shared
from moe.router.routing import Routing, without_repeats
from moe.weights import Experts
from sharding.collectives import vary, varying
from sharding.costs.transfer import TokenDispatch
from sharding.folding import FoldedMesh

Send = Callable[[Experts[Array], Array, Routing], tuple[Array, Array]]
"""(experts, tokens, routing) -> their sums, and the number of expert ids that overflowed."""


IMPLEMENTATIONS = {
    "all_to_all": partial(one_level_dispatch, exchange_tokens),
    "all_gather": all_gather_dispatch,
    "ragged": partial(one_level_dispatch, exchange_slices),
    "two_level": partial(two_level_dispatch, exchange_tokens),
    "two_level_ragged": partial(two_level_dispatch, exchange_slices),
}


def dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    execution: Execution,
    *,
    capacity: int | None = None,
    product: str | None = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """``sum_k p_k expert_k(x)`` for this device's tokens.

    Communication: `rows_received` for the tokens of each chunk, times ``d_model``, and the small
    arrays that each implementation names.

    Args:
      weights, x: the experts and the normalised tokens of this device.
      routing: expert ids over the experts of all devices, and gate weights. Ids may repeat: an
        expert that a token has twice is sent one row, with the sum of the gate weights.
      execution: its `dispatch`, `exchange_rate`, `server_devices`, `buffer_factor`, `expert_chunks`
        (each has buffers of its own size) and `activation_wire`; the routing is sent unchanged.
      capacity: largest number of expert ids that `routing` sends from one device to one expert;
        None if nothing was dropped. Any beyond that contribute nothing to the result.
      product: implementation of the grouped GEMMs, see
        `moe.experts.feed_forward.routed_experts`; with kernels, kernels also permute and sum the
        tokens that are sent.

    Returns:
      The sums, and the number of expert ids that overflowed at this device, as sender or receiver;
      0 if there is no `buffer_factor` and `capacity` is correct. If any device has an overflow,
      tokens are missing from the sums.

    Raises:
      ValueError: see `check_dispatch`.
    """
    name, chunks, num_local = execution.dispatch, execution.num_chunks, weights.down.shape[0]
    if name is None:
        (num_tokens, k), ep = routing.experts.shape, mesh.size(mesh.ep)
        peer_capacity = peer_capacity_of(k, ep, None, execution.buffer_factor)
        if capacity is not None:
            most = capacity * num_local / chunk_sizes(num_tokens, chunks)[0]
            peer_capacity = min(peer_capacity, most)
        sizes = num_local * ep, k, x.shape[1], x.dtype.itemsize, peer_capacity
        exchange = TokenExchange(*sizes, execution.exchange_rate, execution.activation_wire)
        name = cheapest(exchange, mesh)
    check_dispatch(name, mesh, execution.server_devices)
    # Buffers count on it; a replayed routing may name an expert twice.
    routing = without_repeats(routing, num_local * mesh.size(mesh.ep))
    options = DispatchOptions(mesh, execution, capacity, product, activation)
    send = partial(IMPLEMENTATIONS[name], options=options)
    return dispatch_chunks(send, chunks, weights, x, routing, mesh)


def rows_received(
    implementation: str,
    num_tokens: int,
    k: int,
    num_local: int,
    mesh: FoldedMesh,
    capacity: int | None = None,
    buffer_factor: float | None = None,
    server_devices: int | None = None,
) -> int:
    """Number of rows of ``d_model`` elements that one device receives per layer in the forward
    pass.

    `sharding.costs.transfer.TokenDispatch.token_transfers` counts them, with R from `peer_tokens`.
    For "ragged" and "two_level_ragged" it is the bound, what "all_to_all" and "two_level" receive.

    The backward pass moves as much again, and half of that once more where tokens are not kept for
    it (`moe.remat`). In half precision the sums of "all_gather", forward and backward, travel as
    float32, twice as wide as what is counted here.
    """
    bounds = {"ragged": "all_to_all", "two_level_ragged": "two_level"}
    bound = bounds.get(implementation, implementation)
    per_peer = peer_tokens(num_tokens, k, num_local, mesh, capacity, buffer_factor)
    # Of tokens of one element, whatever its width.
    sizes = num_tokens, per_peer, k, 1, 1
    sent = TokenDispatch(bound, mesh.layout, *sizes, server_devices=server_devices)
    transfers = (replace(each, itemsize=1) for each in sent.token_transfers())
    return round(sum(each.sent(mesh.layout) for each in transfers))


def check_dispatch(name: str, mesh: FoldedMesh, server_devices: int | None = None) -> None:
    """Checks that a dispatcher exists, and that the devices of a mesh support it.

    Raises:
      ValueError: on an unknown name, for "ragged" and "two_level_ragged" on CPU devices, and for
        two levels if servers are unknown or have unequal parts of the devices along ``ep``.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"dispatch={name!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, or None "
            "for the best that applies."
        )
    # A mesh of absent devices may stand for any platform: it is lowered without asking.
    if name in SLICES and mesh.platform == "cpu":
        raise ValueError(
            f'dispatch="{name}" needs jax.lax.ragged_all_to_all, which CPU devices do not have: '
            'use "all_to_all", "all_gather", "two_level" or None.'
        )
    if name in TWO_LEVELS:
        try:
            expert_servers(mesh, server_devices)
        except ValueError as error:
            raise ValueError(f"dispatch={name!r}: {error}") from error


def chunk_sizes(num_tokens: int, chunks: int) -> list[int]:
    """Tokens of each chunk: equal but for one token, larger chunks first, none of them empty (so
    that fewer tokens than chunks are as many chunks as tokens)."""
    chunks = max(1, min(chunks, num_tokens))
    each, more = divmod(num_tokens, chunks)
    return [each + (chunk < more) for chunk in range(chunks)]


def dispatch_chunks(
    send: Send,
    chunks: int,
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """Chunked dispatch: ``send(weights, x, routing)`` of each chunk of consecutive tokens, joined.

    Chunks are independent: a scheduler may overlap the dispatch of one with the GEMMs of the one
    before and the combine of the one before that, forward and backward. With c chunks each
    collective of the layer becomes c collectives of a c-th of the bytes. Each chunk has a scope of
    its own in the names of a compiled program, ``expert_chunk_0`` and so on, by which a profile
    tells them apart.

    The output of a token does not depend on other tokens, so chunks change no output; gradients of
    weights are sums over chunks and differ in rounding. Dropping is decided before
    (`moe.router.layer`), for all chunks together. Buffers are sized for the tokens of a chunk: a
    capacity C limits what all chunks send to an expert and so what one of them may send, ``min(t /
    c, C L)`` tokens to a peer with L experts, and shrinks nothing if ``t / c <= C L``; a
    `buffer_factor` is a multiple of the balanced load of a chunk, which a chunk exceeds more easily
    than all tokens do.

    Memory: the gradient of a layer's experts exists once for each chunk until it is summed.

    References:
      Jin et al., "MegaScale-MoE", 2025 (communication beside products). MaxText has such chunks too
      (`num_moe_token_chunks`). https://arxiv.org/abs/2505.11432
    """
    sizes = chunk_sizes(x.shape[0], chunks)
    if len(sizes) == 1:
        return send(weights, x, routing)
    # Before they are shared out: a gradient that is the same on some devices is summed over these
    # once, and not once for each chunk.
    axes = varying(x) | varying(routing.experts) | varying(routing.probs)
    matrices = vary((weights.gate_up, weights.down), tuple(sorted(axes | {*mesh.ep, *mesh.etp})))
    starts = list(accumulate(sizes))[:-1]
    tokens, experts, probs = (jnp.split(array, starts) for array in (x, *routing))
    sums, overflows = [], []
    chunk_inputs = zip(shared(matrices, len(sizes)), tokens, experts, probs, strict=True)
    for chunk, ((gate_up, down), chunk_tokens, *routed) in enumerate(chunk_inputs):
        chunk_weights = replace(weights, gate_up=gate_up, down=down)
        with jax.named_scope(f"expert_chunk_{chunk}"):
            chunk_sums, overflow = send(chunk_weights, chunk_tokens, Routing(*routed))
        sums.append(chunk_sums)
        overflows.append(overflow)
    return jnp.concatenate(sums), sum(overflows[1:], overflows[0])
