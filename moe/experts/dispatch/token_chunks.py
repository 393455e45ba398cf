"""Chunked token dispatch: communication of one chunk overlaps the expert GEMMs of another.

A device's tokens are split into chunks of consecutive ones, and each chunk is dispatched, computed
and combined by itself. Chunks are independent: a scheduler may overlap the dispatch of one with the
GEMMs of the one before and the combine of the one before that, forward and backward. With c chunks
each collective of the layer becomes c collectives of a c-th of the bytes.

The output of a token does not depend on other tokens, so chunks change no output; gradients of
weights are sums over chunks and differ in rounding. Dropping is decided before
(`moe.router.capacity`), for all chunks together. Buffers are sized for the tokens of a chunk: a
capacity C limits what all chunks send to an expert and so what one of them may send, ``min(t / c, C
L)`` tokens to a peer with L experts, and shrinks nothing if ``t / c <= C L``; a `buffer_factor` is
a multiple of the balanced load of a chunk, which a chunk exceeds more easily than all tokens do.

Memory: the gradient of a layer's experts exists once for each chunk until it is summed.

References:
  Jin et al., "MegaScale-MoE", 2025 (communication beside products). MaxText has such chunks too
  (`num_moe_token_chunks`). https://arxiv.org/abs/2505.11432
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.precision import shared
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import vary, varying
from sharding.folding import FoldedMesh

Send = Callable[[Experts[Array], Array, Routing], tuple[Array, Array]]
"""(experts, tokens, routing) -> their sums, and the number of expert ids that overflowed."""


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
    """Calls ``send(weights, x, routing)`` for each chunk of tokens and joins the results.

    Each chunk has a scope of its own in the names of a compiled program, ``expert_chunk_0`` and so
    on, by which a profile tells them apart.

    Args:
      send: a dispatcher.
      chunks: number of chunks.
    """
    sizes = chunk_sizes(x.shape[0], chunks)
    if len(sizes) == 1:
        return send(weights, x, routing)
    # Before they are shared out: a gradient that is the same on some devices is summed over these
    # once, and not once for each chunk.
    axes = varying(x) | varying(routing.experts) | varying(routing.probs)
    matrices = vary((weights.gate_up, weights.down), tuple(axes | {*mesh.ep, *mesh.etp}))
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
