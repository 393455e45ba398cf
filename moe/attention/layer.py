"""Grouped-query attention with rotary position embedding, heads sharded over ``tp``.

Each ``tp`` rank has a shard of the flattened tokens of the residual stream; the layer gathers the
tokens, computes its local heads and reduce-scatters the sum. The product of queries, keys and
values is passed in as `core_attention` (Megatron's word), so that training (all positions, sharded
over ``cp``) and decoding (a KV cache) are one layer.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.attention import latent
from moe.attention.delta import DeltaCore, delta_heads
from moe.attention.latent import LatentCore
from moe.attention.projections import join_heads, queries_keys_values
from moe.attention.rotary import Positions
from moe.config import Model, ModelConfig
from moe.ops.mask import MAX_INDEX, Window
from moe.ops.precision import rms_norm
from moe.remat import STREAM
from moe.weights import Attention, DeltaNet, LatentAttention
from sharding.collectives import gather_tokens, scatter_tokens


@runtime_checkable
class CoreAttention(Protocol):
    """(queries, keys, values) of the gathered tokens -> attention output of each query.

    Values may be narrower or wider than keys; `scale` multiplies the scores, None is
    ``head_dim**-0.5``. `sinks` has a score for each head that belongs to no key: it is a term of
    every softmax and has no value.
    """

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: float | None = None,
        sinks: Array | None = None,
    ) -> Array: ...


def attention(
    weights: Attention[Array] | LatentAttention[Array] | DeltaNet[Array],
    x: Float[Array, "local d_model"],
    positions: Positions,
    core_attention: CoreAttention | LatentCore | DeltaCore,
    model: Model,
    layer_index: int | Int[Array, ""],
) -> Float[Array, "local d_model"]:
    """The attention term of a block, for this rank's shard of the tokens.

    Communication per device: one `gather_tokens` and one `scatter_tokens` over ``tp``, each of
    ``tokens x d_model (tp - 1) / tp`` elements, of the tokens of a ``cp`` rank; `core_attention`
    adds what `moe.attention.context_parallel` says.

    Args:
      x: the residual stream, sharded over ``cp`` and ``tp`` along the flattened tokens.
      positions: position of each gathered token (the tokens of this ``cp`` rank).
      core_attention: attention between the projections; has the heads of this rank only.
    """
    config = model.config
    h = norm_before(x, weights.norm, config)
    # Norm before gather: each rank normalises its own tokens (sequence parallelism).
    h = gather_tokens(h, model.mesh.tp)
    if isinstance(weights, DeltaNet):
        assert isinstance(core_attention, DeltaCore)
        out = delta_heads(weights, h, core_attention, model)
    elif isinstance(weights, LatentAttention):
        assert not isinstance(core_attention, DeltaCore)
        query = latent.queries(weights, h, positions, config)
        narrow = latent.latent_vectors(weights, h, positions, config)
        if isinstance(core_attention, LatentCore):
            out = core_attention.attend(query, narrow, weights.up)
        else:
            out = core_attention(query, *latent.expand_latent(narrow, weights.up, config))
    else:
        assert not isinstance(core_attention, (LatentCore, DeltaCore))
        query, key, value, gate = queries_keys_values(weights, h, positions, model, layer_index)
        out = core_attention(query, key, value, config.attention_scale, weights.sinks)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    term = scatter_tokens(join_heads(out, weights.out), model.mesh.tp)
    if isinstance(weights, Attention) and weights.out_bias is not None:
        term = term + weights.out_bias[None].astype(term.dtype)
    return norm_after(term, weights.norm, weights.out_norm, config)


def window_of_layer(config: ModelConfig, layer_index: int | Int[Array, ""]) -> Window:
    """Sliding window of a layer, whose index is known only at run time in a pipeline stage."""
    window, full = config.sliding_window, config.full_attention_layers
    if window is None or not full:
        return window
    if isinstance(layer_index, int):
        return None if layer_index in full else window
    window_per_layer = [
        MAX_INDEX if layer in full else window for layer in range(config.num_layers)
    ]
    return jnp.asarray(window_per_layer, jnp.int32)[layer_index]


def norm_before(
    x: Float[Array, "local d_model"], norm: Float[Array, "d_model"], config: ModelConfig
) -> Float[Array, "local d_model"]:
    """Input of attention or of a feed-forward layer: the residual stream after the pre-norm, if the
    network has one."""
    return x if config.norm_placement == "after" else rms_norm(x, norm, config.norm_epsilon)


def norm_after(
    term: Float[Array, "local d_model"],
    norm: Float[Array, "d_model"],
    out_norm: Float[Array, "d_model"] | None,
    config: ModelConfig,
) -> Float[Array, "local d_model"]:
    """Output of attention or of a feed-forward layer after the post-norm, if the network has one;
    it is added to the residual stream."""
    if config.norm_placement == "before":
        return term
    # Saved as the stream is, so that no backward pass repeats the collective that gave it.
    term, scale = checkpoint_name(term, STREAM), norm if out_norm is None else out_norm
    return rms_norm(term, scale, config.norm_epsilon)
