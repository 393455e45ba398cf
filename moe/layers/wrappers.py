"""Wrappers of a layer: FSDP unshards its weights, rematerialisation runs it again in the backward
pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moe.config import ModelConfig
from moe.layers.depth import select_attention
from moe.layers.two_batch_overlap import Streams
from moe.remat import SAVED, SAVED_BEFORE_NORMS, UNSAVED, rematerialise
from moe.weights import DeltaNet, Layer
from sharding.collectives import typed_zeros
from sharding.zero import ShardDim, unshard, weights_of

RunLayer = Callable[[Layer[Array], Streams], tuple[Streams, Any]]
"""Runs a layer: weights and residual streams to the streams after it, and its router statistics
with what was collected of its keys and values."""


def with_fsdp(run_layer: RunLayer, shard_dims: Layer[ShardDim] | None) -> RunLayer:
    """Unshards the weights of a layer before it runs; `shard_dims` as in `blocks`."""

    def run_unsharded(layer: Layer[Array], streams: Streams):
        layer = weights_of(layer)
        if shard_dims is not None:
            layer = unshard(
                layer, select_attention(shard_dims, isinstance(layer.attention, DeltaNet))
            )
        return run_layer(layer, streams)

    return run_unsharded


def with_remat(
    run_layer: RunLayer, config: ModelConfig, is_present: Array | None, *, in_scan: bool
) -> RunLayer:
    """Rematerialises a layer in the backward pass, its unsharded weights too.

    Args:
      is_present: whether the layer exists; an absent one leaves the streams as they are. None if it
        does.
      in_scan: true if each iteration of a scan is one layer.
    """
    normed = config.mla is not None or config.query_key_norm is not None
    remat = partial(
        rematerialise,
        policy=config.execution.remat,
        in_scan=in_scan,
        saved=SAVED_BEFORE_NORMS if normed else SAVED,
    )
    if is_present is None:
        return remat(run_layer)
    if config.execution.remat not in UNSAVED:
        # Inside what is rematerialised, which saves its inputs and so no copies of the weights.
        return remat(_run_if_present(is_present, run_layer))

    def run_and_select(layer: Layer[Array], streams: Streams):
        after, outs = remat(run_layer, present=is_present)(layer, streams)
        return jax.tree.map(partial(jnp.where, is_present), after, streams), outs

    return run_and_select


def _run_if_present(is_present: Array, run_layer: Callable[..., Any]) -> Callable[..., Any]:
    """`run_layer` if the layer is present; otherwise the unchanged residual stream and sums of
    zero."""

    def skip(layer: Layer[Array], x: Streams) -> tuple[Streams, Any]:
        _, out = jax.eval_shape(run_layer, layer, x)
        return x, typed_zeros(out)

    return lambda layer, x: lax.cond(is_present, run_layer, skip, layer, x)
