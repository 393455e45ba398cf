"""The network as the stages of a pipeline: embedding, chunks of layers, last norm and head.

`scan_pieces` runs micro-batches forward and `gradients` forward and backward. What is read off the
last hidden states is the caller's. The plain twin of both is `moe.model.run`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe import model
from moe.config import ModelConfig
from moe.router.balance import router_loss
from moe.router.statistics import RouterStatistics
from moe.tokens.packing import Stream
from moe.weights import Layer, Transformer
from sharding import pipeline
from sharding.collectives import all_sum, join_shards
from sharding.folding import FoldedMesh
from sharding.pipeline import Pipeline, Stages
from sharding.zero import Cut

Piece = Any
"""A pytree of one micro-batch's arrays; `pieces` have another dimension in front."""
Read = Callable[[Transformer[Array], Array, Piece], Any]
"""(weights, last hidden states, piece) -> what a head makes of them."""


def scan_pieces(
    weights: Transformer[Array],
    pieces: Piece,
    stream_of: Callable[[Piece], Stream],
    read: Read,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Any, RouterStatistics[Array] | None]:
    """The micro-batches forward through the stages.

    Args:
      weights: of this device, as `moe.placement.in_rounds` stores them.
      pieces: micro-batches, equal on all stages.
      stream_of: the tokens of a piece.
      read: called on the last stage.

    Returns:
      What `read` gives, ``[micro, ...]``, equal on all stages; and the router's sums over pieces
      and layers on this device, as `moe.model.run` gives them.
    """
    num_tokens = jnp.zeros((), jnp.int32)  # the losses of the routers are not asked for
    stages = _stages(weights, stream_of, read, num_tokens, config, mesh)
    outs, stats = pipeline.apply(
        stages, _ends(weights), _rounds(weights, mesh), pieces, _pipeline(mesh)
    )
    return outs, _joined(stats, mesh)


def gradients(
    weights: Transformer[Array],
    pieces: Piece,
    stream_of: Callable[[Piece], Stream],
    read: Read,
    num_tokens: Int[Array, ""],
    config: ModelConfig,
    mesh: FoldedMesh,
    cuts: Layer[Cut] | None = None,
) -> tuple[Float[Array, ""], Transformer[Array], dict[str, Any], RouterStatistics[Array] | None]:
    """The loss of the micro-batches, the routers' included, and its gradient.

    Args:
      weights: as in `scan_pieces`, varying over all mesh axes.
      pieces: as in `scan_pieces`.
      stream_of: as in `scan_pieces`.
      read: gives a loss and metrics.
      num_tokens: valid tokens of the whole batch, for the routers' losses.
      cuts: of the layers, as in `moe.model.blocks`.

    Returns:
      The loss of this device, which adds up over stages; its gradient with respect to `weights`,
      zero where another stage uses them; the metrics ``[micro, ...]``, equal on all stages; and the
      router's sums, as in `scan_pieces`.
    """
    stages = _stages(weights, stream_of, read, num_tokens, config, mesh, cuts)
    sums = pipeline.gradients(
        stages, _ends(weights), _rounds(weights, mesh), pieces, _pipeline(mesh)
    )
    layers = jax.tree.map(lambda x, like: x.reshape(like.shape), sums.layers, weights.layers)
    grads = replace(_with_ends(weights, sums.ends), layers=layers)
    return sums.loss, grads, sums.metrics, _joined(sums.statistics, mesh)


def _stages(
    weights: Transformer[Array],
    stream_of: Callable[[Piece], Stream],
    read: Read,
    num_tokens: Int[Array, ""],
    config: ModelConfig,
    mesh: FoldedMesh,
    cuts: Layer[Cut] | None = None,
) -> Stages:
    stacked = config.num_layers - config.num_dense_layers
    depth = stacked // (mesh.layout.pp * mesh.layout.vpp)

    def first(ends, piece):
        stream, whole = stream_of(piece), _with_ends(weights, ends)
        model.check_runs(stream.tokens.shape[0], mesh)
        x = model.embed(whole, stream.tokens, config, mesh)
        return model.first_blocks(whole, x, stream, config, mesh)

    def chunk(layers, x, piece, number):
        before = config.num_dense_layers + number * depth
        x, stats = model.blocks(layers, x, stream_of(piece), config, mesh, before, cuts)
        return x, router_loss(stats, config, mesh, num_tokens), stats

    def last(ends, x, piece):
        whole = _with_ends(weights, ends)
        return read(whole, model.last_norm(whole, x, config), piece)

    return Stages(first, chunk, last)


def _pipeline(mesh: FoldedMesh) -> Pipeline:
    return Pipeline(mesh.pp, mesh.axes, mesh.layout.vpp)


def _ends(weights: Transformer[Array]) -> dict[str, Any]:
    """The weights outside the stack of layers. A tied embedding is used at both ends."""
    names = ("embedding", "first_layers", "norm", "head")
    return {name: getattr(weights, name) for name in names}


def _with_ends(weights: Transformer[Array], ends: dict[str, Any]) -> Transformer[Array]:
    return replace(weights, **ends)


def _rounds(weights: Transformer[Array], mesh: FoldedMesh) -> Any:
    """The layers of this stage, ``[round, layer, ...]``."""
    if mesh.layout.vpp > 1:
        return weights.layers
    return jax.tree.map(lambda x: x[None], weights.layers)


def _joined(
    stats: RouterStatistics[Array] | None, mesh: FoldedMesh
) -> RouterStatistics[Array] | None:
    """The sums over all layers, from those of each round: `load` in the order of the layers."""
    if stats is None:
        return None
    total = all_sum(jax.tree.map(lambda x: jnp.sum(x, axis=0), stats), mesh.pp)
    load = join_shards(stats.load[None], mesh.pp)  # [stage, round, layer, route]
    load = jnp.swapaxes(load, 0, 1).reshape(-1, load.shape[-1])
    return replace(total, load=load)
