"""Tokens go to the experts and back in parts, so that one travels while another is multiplied.

A device's tokens are cut into chunks of consecutive ones, and each chunk goes out, through the
products and back by itself. Nothing orders two chunks: a scheduler may run the dispatch of one
beside the products of the one before and the combine of the one before that, forward and backward.
With c chunks each collective of the layer becomes c of a c-th of the bytes.

What a token gets does not depend on the other tokens, so that chunks change no output; gradients of
weights are sums over chunks and differ in the last digits. Which choices are dropped is decided
before (`moe.router.capacity`), for all chunks together. Buffers are those of the tokens of a chunk:
a capacity C bounds what all chunks send an expert and so what one of them may, ``min(t / c, C L)``
tokens to a peer with L experts, and shrinks nothing where ``t / c <= C L``; a `buffer_factor` is a
multiple of what even routing sends of a chunk, which a chunk exceeds more easily than the whole.

Memory: the gradient of a layer's experts is there once for each chunk until it is added up.

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
"""(experts, tokens, routing) -> their sums, and how many choices found no room."""


def chunk_sizes(num_tokens: int, chunks: int) -> list[int]:
    """Tokens of each chunk: equal but for one token, larger chunks first, none of them empty (so
    that fewer tokens than chunks are as many chunks as tokens)."""
    chunks = max(1, min(chunks, num_tokens))
    each, more = divmod(num_tokens, chunks)
    return [each + (chunk < more) for chunk in range(chunks)]


def in_token_chunks(
    send: Send,
    chunks: int,
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """``send(weights, x, routing)``, chunk by chunk of the tokens.

    Each chunk has a scope of its own in the names of a compiled program, ``expert_chunk_0`` and so
    on, by which a profile tells them apart.

    Args:
      send: a dispatcher.
      chunks: how many.
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
    parts = zip(shared(matrices, len(sizes)), tokens, experts, probs, strict=True)
    for chunk, ((gate_up, down), of_chunk, *routed) in enumerate(parts):
        own = replace(weights, gate_up=gate_up, down=down)
        with jax.named_scope(f"expert_chunk_{chunk}"):
            done, overflow = send(own, of_chunk, Routing(*routed))
        sums.append(done)
        overflows.append(overflow)
    return jnp.concatenate(sums), sum(overflows[1:], overflows[0])
