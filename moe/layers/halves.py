"""Two-batch overlap: the rows of a device go through each layer in two independent halves.

The halves share no operation, so a scheduler may overlap communication of one with computation of
the other, forward and backward. Each collective of a layer becomes two. A loop over layers, and
`jax.checkpoint` around one, start a layer when both halves have finished the one before.

Rows share the weights, whose gradient is the sum over both halves, and the load in auxiliary
losses: the load of a micro-batch is that of both halves (`moe.router.balance.over_halves`), and
nothing but these losses waits for it.

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

from moe.config import ModelConfig
from moe.precision import shared
from moe.router.balance import over_halves
from moe.router.statistics import RouterStatistics
from moe.tokens.packing import PackedBatch
from moe.weights import Layer
from sharding.collectives import gather_tokens, local_shard
from sharding.folding import FoldedMesh

Streams = tuple[Array, ...]
"""The residual stream of each half, or of all rows."""
RunHalf = Callable[[int, Layer[Array], Array], tuple[Array, RouterStatistics[Array] | None]]
"""(index of the half, layer, residual stream) -> the stream after the layer, and the router's
sums."""


def in_streams(x: Shaped[Array, "local *rest"], packed: PackedBatch, mesh: FoldedMesh) -> Streams:
    """Splits this rank's shard of the residual stream into those of the halves."""
    starts = list(accumulate(_sizes(packed, mesh)))[:-1]
    return tuple(jnp.split(x, starts)) if starts else (x,)


def joined(streams: Streams) -> Array:
    """Concatenates the streams again: the inverse of `in_streams`."""
    return streams[0] if len(streams) == 1 else jnp.concatenate(streams)


def through(
    run_half: RunHalf,
    layer: Layer[Array],
    streams: Streams,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Streams, RouterStatistics[Array] | None]:
    """Runs a layer on each of the streams.

    The halves have scopes of their own in the names of a compiled program, ``half_0`` and
    ``half_1``.
    """
    if len(streams) == 1:
        x, stats = run_half(0, layer, streams[0])
        return (x,), stats
    after, found = [], []
    for number, (own, x) in enumerate(zip(shared(layer, len(streams)), streams, strict=True)):
        with jax.named_scope(f"half_{number}"):
            x, stats = run_half(number, own, x)
        after.append(x)
        found.append(stats)
    routed = [stats for stats in found if stats is not None]
    return tuple(after), over_halves(routed, config, mesh) if routed else None


def in_rows(
    x: Shaped[Array, "local *rest"], packed: PackedBatch, mesh: FoldedMesh
) -> Shaped[Array, "local *rest"]:
    """Reorders an array per token from the order of the halves to that of the rows
    (`PackedBatch.zigzag`); input and output are this rank's shards.

    Communication per device: none, or over ``tp``, whose ranks have other tokens of the rows then,
    one `gather_tokens` of those of the ``cp`` rank; backward a `scatter_tokens`.
    """
    if not packed.halves:
        return x
    parts = [gather_tokens(part, mesh.tp) for part in in_streams(x, packed, mesh)]
    sections = zip(
        *(half.zigzag.split(part) for half, part in zip(packed.halves, parts, strict=True)),
        strict=True,
    )
    return local_shard(packed.zigzag.join(*map(jnp.concatenate, sections)), mesh.tp)


def choices_in_rows(
    stats: RouterStatistics[Array] | None, packed: PackedBatch, mesh: FoldedMesh
) -> RouterStatistics[Array] | None:
    """Router statistics with the recorded expert ids ``[layer, local, k]`` in the order of the
    rows."""
    if stats is None or stats.choices is None or not packed.halves:
        return stats
    choices = in_rows(jnp.moveaxis(stats.choices, 0, 1), packed, mesh)
    return replace(stats, choices=jnp.moveaxis(choices, 1, 0))


def _sizes(packed: PackedBatch, mesh: FoldedMesh) -> list[int]:
    """Number of tokens of each stream on a rank."""
    return [half.tokens.shape[0] // mesh.size(mesh.sequence) for half in packed.streams]
