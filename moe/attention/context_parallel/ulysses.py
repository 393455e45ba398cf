"""DeepSpeed Ulysses: one all-to-all exchanges tokens for heads, and a second one reverses it."""

import math

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Shaped

from moe.attention.context_parallel.ring import Key, Output, Query, Sinks, Value
from moe.attention.core import core_attention
from moe.ops.mask import Mask, SegmentMask, Window
from moe.remat import OPERAND
from sharding.collectives import Axes, local_shard, match_varying, swap_shards
from sharding.folding import FoldedMesh


def ulysses(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    attention: str | None,
    mesh: FoldedMesh,
    scale: float | None = None,
    window: Window = None,
    sinks: Sinks = None,
) -> Output:
    """Exchanges tokens for heads and back: each device has whole sequences, for its part of the
    query heads, which ``cp`` must divide.

    Where ``cp`` does not divide the key/value heads, each of them is repeated the least number of
    times that helps (`num_replicas_of`); the gradients of its copies are summed in float32.

    Communication per device and layer, forward: one all-to-all of queries, keys and values in one
    array, ``T (H + 2 K c) D (cp - 1) / cp^2`` elements sent, and one back of ``T H D (cp - 1) /
    cp^2``; backward as much. T is the number of tokens of all ``cp`` ranks, H and K are the query
    and key/value heads of a ``tp`` rank, D is their width, and c is the number of copies of each
    key/value head. With ``c = 1`` and m = H / K that is ``T H D (2 + 2 / m) (cp - 1) / cp^2``: the
    volume of tensor parallelism, ``2 T H D (cp - 1) / cp``, times ``(1 + 1 / m) / cp``.
    MegaScale-MoE prints twice that as equation (2).

    References:
      Jacobs et al., "DeepSpeed Ulysses", 2023. https://arxiv.org/abs/2309.14509
      Jin et al., "MegaScale-MoE", 2025, section 3.1 (whole attention weights on every device, and
      the same devices for the experts). https://arxiv.org/abs/2505.11432
    """
    ranks = mesh.size(mesh.cp)
    replicas = num_replicas_of(key.shape[1], ranks)
    key, value = (_repeat_heads(x, replicas) for x in (key, value))
    zigzag = mask.zigzag
    exchanged = _gather_sequences(match_varying((query, key, value)), mesh.cp, ranks)
    queries, keys, values = (zigzag.restore(checkpoint_name(x, OPERAND)) for x in exchanged)
    sinks = None if sinks is None else local_shard(sinks, mesh.cp)
    query_indices = mask.full_indices()
    # Rows are whole and in order, and a section's own keys come last: the masks are causal, and a
    # kernel can skip the hidden half.
    masks = (
        Mask(*indices, window, causal=True, single=mask.single)
        for indices in zip(query_indices, mask.key_indices(query_indices), strict=True)
    )
    sections = zip(queries, mask.key_sections(keys), mask.key_sections(values), masks, strict=True)
    out = zigzag.flatten(*(core_attention(*each, scale, attention, sinks) for each in sections))
    return swap_shards(out, mesh.cp, split=0, join=1)


def num_replicas_of(kv_heads: int, ranks: int) -> int:
    """Copies of each key/value head: the least number for which `ranks` divides all copies."""
    return ranks // math.gcd(kv_heads, ranks)


def _repeat_heads(x: Shaped[Array, "token heads width"], replicas: int) -> Array:
    if replicas == 1:
        return x
    # Cast to float32 for the gradient alone: the sum over bfloat16 copies is then in float32 and
    # rounded once.
    return jnp.repeat(x.astype(jnp.float32), replicas, axis=1).astype(x.dtype)


def _gather_sequences(
    arrays: tuple[Array, ...], axes: Axes, ranks: int
) -> tuple[Shaped[Array, "all_tokens _heads _width"], ...]:
    """All-to-all of arrays ``[token, heads, width]``: from this rank's tokens and all heads to all
    tokens and this rank's part of the heads."""
    if ranks == 1:
        return arrays
    # One array, with the parts for each receiving rank side by side: one collective for all three,
    # whatever their heads and widths.
    rows = [x.reshape(x.shape[0], ranks, -1) for x in arrays]
    ends = [sum(x.shape[2] for x in rows[:count]) for count in range(1, len(rows))]
    exchanged = swap_shards(jnp.concatenate(rows, axis=2), axes, split=1, join=0)
    split = jnp.split(exchanged[:, 0], ends, axis=1)
    return tuple(
        received.reshape(received.shape[0], -1, x.shape[2])
        for received, x in zip(split, arrays, strict=True)
    )
