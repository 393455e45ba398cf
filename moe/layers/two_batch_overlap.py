"""Two-batch overlap: the rows of a device go through each layer in two independent halves.

The halves share no operation, so a scheduler may overlap communication of one with computation of
the other, forward and backward. Each collective of a layer becomes two. A loop over layers, and
`jax.checkpoint` around one, start a layer when both halves have finished the one before.

Rows share the weights, whose gradient is the sum over both halves, and the load in auxiliary
losses: the load of a micro-batch sums both halves (`moe.router.balance.merge_half_batches`),
and nothing but these losses waits for it.

References:
  DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.4.1 (two micro-batches at once, one
  communicating under the products of the other). https://arxiv.org/abs/2412.19437
  Jin et al., "MegaScale-MoE", 2025, section 3.3. https://arxiv.org/abs/2505.11432
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from moe.config import Model
from moe.ops.precision import shared
from moe.router.balance import merge_half_batches
from moe.router.statistics import RouterStatistics
from moe.tokens.packing import PackedBatch
from moe.weights import Layer
from sharding.collectives import gather_tokens, local_shard
from sharding.folding import FoldedMesh

Streams = tuple[Array, ...]
"""The residual stream of each half, or of all rows."""
RunHalfBatch = Callable[[int, Layer[Array], Array], tuple[Array, RouterStatistics[Array] | None]]
"""(index of the half, layer, residual stream) -> the stream after the layer, and the router's
sums."""


def split_streams(
    x: Shaped[Array, "local *rest"], packed: PackedBatch, mesh: FoldedMesh
) -> Streams:
    """Splits this rank's shard of the residual stream into the shards of the halves."""
    starts = list(accumulate(_sizes(packed, mesh)))[:-1]
    return tuple(jnp.split(x, starts)) if starts else (x,)


def join_streams(streams: Streams) -> Array:
    """Concatenates the streams again: the inverse of `split_streams`."""
    return streams[0] if len(streams) == 1 else jnp.concatenate(streams)


def run_streams(
    run_half_batch: RunHalfBatch, layer: Layer[Array], streams: Streams, model: Model
) -> tuple[Streams, RouterStatistics[Array] | None]:
    """Runs a layer on each of the streams.

    The halves have scopes of their own in the names of a compiled program, ``half_0`` and
    ``half_1``.
    """
    if len(streams) == 1:
        x, stats = run_half_batch(0, layer, streams[0])
        return (x,), stats
    after, stream_stats = [], []
    inputs = zip(shared(layer, len(streams)), streams, strict=True)
    for index, (stream_layer, x) in enumerate(inputs):
        with jax.named_scope(f"half_{index}"):
            x, stats = run_half_batch(index, stream_layer, x)
        after.append(x)
        stream_stats.append(stats)
    routed_stats = [stats for stats in stream_stats if stats is not None]
    return tuple(after), merge_half_batches(routed_stats, model) if routed_stats else None


def restore_row_order(
    x: Shaped[Array, "local *rest"], packed: PackedBatch, mesh: FoldedMesh
) -> Shaped[Array, "local *rest"]:
    """Reorders an array per token from the order of the halves to the order of the rows
    (`PackedBatch.zigzag`); input and output are this rank's shards.

    Communication per device: none, or over ``tp``, whose ranks have other tokens of the rows then,
    one `gather_tokens` of the tokens of the ``cp`` rank; backward a `scatter_tokens`.
    """
    if not packed.half_batches:
        return x
    half_batches = zip(packed.half_batches, split_streams(x, packed, mesh), strict=True)
    shards = [half.zigzag.split(gather_tokens(shard, mesh.tp)) for half, shard in half_batches]
    sections = zip(*shards, strict=True)
    return local_shard(packed.zigzag.join(*map(jnp.concatenate, sections)), mesh.tp)


def restore_choices_order(
    stats: RouterStatistics[Array] | None, packed: PackedBatch, mesh: FoldedMesh
) -> RouterStatistics[Array] | None:
    """Router statistics with the recorded expert ids ``[layer, local, k]`` in the order of the
    rows."""
    if stats is None or stats.choices is None or not packed.half_batches:
        return stats
    choices = restore_row_order(jnp.moveaxis(stats.choices, 0, 1), packed, mesh)
    return replace(stats, choices=jnp.moveaxis(choices, 1, 0))


def _sizes(packed: PackedBatch, mesh: FoldedMesh) -> list[int]:
    """Number of tokens of each stream on a rank."""
    return [half.tokens.shape[0] // mesh.size(mesh.sequence) for half in packed.streams]
