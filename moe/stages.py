"""Pipeline parallelism of the network: stages of embedding, chunks of layers, last norm and head.

`scan_micro_batches` runs micro-batches forward and `gradients` forward and backward. The caller
passes the function of the last hidden states. The reference implementation of both is
`moe.model.run`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe import placement
from moe.adapters import combine_trees
from moe.config import Model
from moe.layers.two_batch_overlap import restore_row_order
from moe.model import LayerSpan, blocks, check_num_tokens, embed, first_blocks, last_norm
from moe.router.balance import router_loss
from moe.router.statistics import RouterStatistics
from moe.tokens.packing import PackedBatch
from moe.weights import Layer, Transformer
from sharding import pipeline
from sharding.collectives import all_sum, join_shards
from sharding.folding import FoldedMesh
from sharding.pipeline import Pipeline, Stages
from sharding.zero import ShardDim

MicroBatch = Any
"""A pytree of one micro-batch's arrays; `micro_batches` have another dimension in front."""
ApplyHead = Callable[[Transformer[Array], Array, MicroBatch], Any]
"""(weights, last hidden states, micro_batch) -> output of a head."""


class Ends(NamedTuple):
    """Functions of a micro-batch before the first layer and after the last.

    Attributes:
      pack: gives its tokens.
      apply_head: called on the last stage; with `gradients` it gives a loss and metrics.
      num_tokens: valid tokens of the whole batch, for the routers' losses; 0 if no loss needs it.
    """

    pack: Callable[[MicroBatch], PackedBatch]
    apply_head: ApplyHead
    num_tokens: int | Int[Array, ""] = 0


def scan_micro_batches(
    weights: Transformer[Array], micro_batches: MicroBatch, ends: Ends, model: Model
) -> tuple[Any, RouterStatistics[Array] | None]:
    """Runs micro-batches forward through the pipeline stages.

    Args:
      weights: weights of this device, as `moe.placement.in_chunks` stores them.
      micro_batches: micro-batches, equal on all stages.

    Returns:
      Outputs of the head, ``[micro_batch, ...]``, equal on all stages; and the router's sums
      over micro-batches and layers on this device, as in `moe.model.run`, with requested `choices`
      as ``[layer, micro_batch, token, k]``.
    """
    num_micro_batches = jax.tree.leaves(micro_batches)[0].shape[0]
    stages = _number_micro_batches(_stages(weights, ends, model), num_micro_batches)
    numbered = jnp.arange(num_micro_batches), micro_batches
    outs, stats = pipeline.apply(
        stages, _ends(weights), _chunks_of(weights, model.mesh), numbered, _pipeline(model.mesh)
    )
    return outs, _join_statistics(stats, model)


def gradients(
    weights: Transformer[Array],
    micro_batches: MicroBatch,
    ends: Ends,
    model: Model,
    shard_dims: Layer[ShardDim] | None = None,
    frozen: Transformer[Array] | None = None,
) -> tuple[Float[Array, ""], Transformer[Array], dict[str, Any], RouterStatistics[Array] | None]:
    """Loss of the micro-batches, auxiliary losses of the routers included, and its gradient.

    Args:
      weights: as in `scan_micro_batches`, varying over all mesh axes.
      micro_batches: as in `scan_micro_batches`.
      shard_dims: of the layers, as in `moe.model.blocks`.
      frozen: weights that are not trained, None in `weights` (`moe.adapters.select_frozen`);
        None if all weights are trained.

    Returns:
      The loss of this device, which adds up over stages; its gradient with respect to `weights`,
      zero where another stage uses them; the metrics ``[micro_batch, ...]``, equal on all stages;
      and the router's sums, as in `scan_micro_batches`.
    """
    stages, mesh = _stages(weights, ends, model, shard_dims), model.mesh
    if frozen is not None:
        stages = _with_frozen(stages, frozen, mesh)
    sums = pipeline.gradients(
        stages, _ends(weights), _chunks_of(weights, mesh), micro_batches, _pipeline(mesh)
    )
    # One chunk per stage was given a dimension of its own (`_chunks_of`), which goes again.
    layers = jax.tree.map(lambda x, like: x.reshape(like.shape), sums.layers, weights.layers)
    grads = replace(weights, **sums.embed_and_head, layers=layers)
    return sums.loss, grads, sums.metrics, _join_statistics(sums.statistics, model)


def _stages(
    weights: Transformer[Array], ends: Ends, model: Model, shard_dims: Layer[ShardDim] | None = None
) -> Stages:
    config, mesh = model.config, model.mesh
    pack, apply_head, num_tokens = ends.pack, ends.apply_head, jnp.asarray(ends.num_tokens)
    # The dense first layers run with the embedding: a pipeline needs chunks of equal layers.
    stacked = config.num_layers - config.num_dense_layers
    starts = jnp.asarray(placement.first_layers_of_chunks(stacked, mesh), jnp.int32)
    depths = jnp.asarray(placement.layers_per_chunk(stacked, mesh), jnp.int32)

    def first(end_weights, micro_batch):
        # Gradients are taken with respect to `end_weights`: they, not `weights`, must be used.
        packed, full_weights = pack(micro_batch), replace(weights, **end_weights)
        check_num_tokens(packed.tokens.shape[0], mesh)
        x = embed(full_weights, packed.tokens, model)
        return first_blocks(full_weights, x, packed, model)[0]

    def chunk(layers, x, micro_batch, chunk_index):
        # Traced: a stage learns only at run time which model chunk, and so which layers, it runs.
        before = config.num_dense_layers + starts[chunk_index]
        present = None if placement.is_even(stacked, mesh) else depths[chunk_index]
        span = LayerSpan(before, present)
        x, stats, _ = blocks(layers, x, pack(micro_batch), model, span, shard_dims)
        return x, router_loss(stats, model, num_tokens), stats

    def last(end_weights, x, micro_batch):
        full_weights = replace(weights, **end_weights)
        x = restore_row_order(x, pack(micro_batch), mesh)
        return apply_head(full_weights, last_norm(full_weights, x, model.config), micro_batch)

    return Stages(first, chunk, last)


def _with_frozen(stages: Stages, frozen: Transformer[Array], mesh: FoldedMesh) -> Stages:
    """The same stages as functions of the trained weights alone. Values derived from frozen weights
    are not saved for the backward pass, as those derived from trained ones are not."""
    ends, layers = _ends(frozen), _chunks_of(frozen, mesh)

    def chunk(trained, x, micro_batch, chunk_index):
        # A constant index if there is one chunk: its layers are then a view and not a gather.
        local_chunk = 0 if mesh.layout.vpp == 1 else chunk_index // mesh.layout.pp
        frozen_layers = jax.tree.map(lambda x: x[local_chunk], layers)
        return stages.chunk(combine_trees(trained, frozen_layers), x, micro_batch, chunk_index)

    return Stages(
        lambda trained, micro_batch: stages.first(combine_trees(trained, ends), micro_batch),
        chunk,
        lambda trained, x, micro_batch: stages.last(combine_trees(trained, ends), x, micro_batch),
    )


def _number_micro_batches(stages: Stages, num_micro_batches: int) -> Stages:
    """The same stages for numbered micro-batches: expert ids of each have a slot of their own in
    the sums over micro-batches."""

    def chunk(layers, x, micro_batch, chunk_index):
        index, inputs = micro_batch
        x, loss, stats = stages.chunk(layers, x, inputs, chunk_index)
        if stats is None or stats.choices is None:
            return x, loss, stats
        is_slot = (jnp.arange(num_micro_batches) == index).reshape(-1, *(1,) * stats.choices.ndim)
        return x, loss, replace(stats, choices=jnp.where(is_slot, stats.choices[None], 0))

    return Stages(
        lambda ends, micro_batch: stages.first(ends, micro_batch[1]),
        chunk,
        lambda ends, x, micro_batch: stages.last(ends, x, micro_batch[1]),
    )


def _pipeline(mesh: FoldedMesh) -> Pipeline:
    return Pipeline(mesh.pp, mesh.axes, mesh.layout.vpp)


def _ends(weights: Transformer[Array]) -> dict[str, Any]:
    """The weights outside the stack of layers, on every stage."""
    # Together, because a tied embedding is used at both ends: its gradients meet in one leaf.
    names = ("embedding", "first_layers", "norm", "head")
    return {name: getattr(weights, name) for name in names}


def _chunks_of(weights: Transformer[Array], mesh: FoldedMesh) -> Any:
    """The layers of this stage, ``[chunk, layer, ...]``."""
    if mesh.layout.vpp > 1:
        return weights.layers
    return jax.tree.map(lambda x: x[None], weights.layers)


def _join_statistics(
    stats: RouterStatistics[Array] | None, model: Model
) -> RouterStatistics[Array] | None:
    """Sums over all layers, from the sums of each chunk; values per layer are in the order of the
    layers."""
    mesh = model.mesh
    if stats is None:
        return None
    sums = replace(stats, choices=None)
    total = all_sum(jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), mesh.pp)

    def by_layer(x: Array) -> Array:
        x = join_shards(x[None], mesh.pp)  # [stage, chunk, layer, ...]
        # Model chunk c is on stage c % stages, so that chunks in order alternate between stages.
        x = jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:])
        return placement.without_padding(
            x, model.config.num_layers - model.config.num_dense_layers, mesh
        )

    choices = stats.choices
    if choices is not None:  # [chunk, micro_batch, layer, token, k]
        choices = by_layer(jnp.swapaxes(choices, 1, 2))
    return replace(total, load=by_layer(stats.load), choices=choices)
