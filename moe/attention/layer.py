"""Grouped-query attention with rotary positions, heads spread over ``tp``.

The residual stream is a shard of the flattened tokens on each ``tp`` rank; the layer gathers the
tokens, works on its own heads and scatters the sum back. What lies between keys and queries is
passed in as `core_attention` (Megatron's word), so that training (all positions at once, spread
over ``cp``) and decoding (a cache) are one layer.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.attention import latent
from moe.attention.delta.layer import delta_heads
from moe.attention.delta.sequences import DeltaCore
from moe.attention.delta.weights import DeltaNet
from moe.attention.latent import LatentCore
from moe.attention.projections import joined_heads, queries_keys_values
from moe.attention.rotation import Positions
from moe.config import ModelConfig
from moe.precision import rms_norm
from moe.remat import STREAM
from moe.weights import Attention, LatentAttention
from sharding.collectives import gather_tokens, scatter_tokens
from sharding.folding import FoldedMesh


@runtime_checkable
class CoreAttention(Protocol):
    """(queries, keys, values) of the gathered tokens -> what each query gets of the values.

    Values may be narrower or wider than keys; `scale` multiplies the scores, None is
    ``head_dim**-0.5``. Of `sinks` each head has a score that is no key's: it takes its part of
    every softmax and gives nothing.
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
    config: ModelConfig,
    mesh: FoldedMesh,
    number: int | Int[Array, ""],
) -> Float[Array, "local d_model"]:
    """The attention term of a block, for this rank's shard of the tokens.

    Communication per device: one `gather_tokens` and one `scatter_tokens` over ``tp``, each of
    ``tokens x d_model (tp - 1) / tp`` elements, of the tokens of a ``cp`` rank; `core_attention`
    adds what `moe.attention.context_parallel.choice` says.

    Args:
      x: the residual stream, sharded over ``cp`` and ``tp`` along the flattened tokens.
      positions: of each gathered token (the tokens of this ``cp`` rank).
      core_attention: what lies between the projections; sees the heads of this rank only.
      number: of the layer.
    """
    h = norm_before(x, weights.norm, config)
    # Norm before gather: each rank normalises its own tokens (sequence parallelism).
    h = gather_tokens(h, mesh.tp)
    if isinstance(weights, DeltaNet):
        assert isinstance(core_attention, DeltaCore)
        out = delta_heads(weights, h, core_attention, config, mesh)
    elif isinstance(weights, LatentAttention):
        assert not isinstance(core_attention, DeltaCore)
        query = latent.queries(weights, h, positions, config)
        narrow = latent.narrow_vectors(weights, h, positions, config)
        if isinstance(core_attention, LatentCore):
            out = core_attention.attend(query, narrow, weights.up)
        else:
            out = core_attention(query, *latent.expanded(narrow, weights.up, config))
    else:
        assert not isinstance(core_attention, (LatentCore, DeltaCore))
        given = weights, h, positions, config, mesh, number
        query, key, value, gate = queries_keys_values(*given)
        out = core_attention(query, key, value, config.attention_scale, weights.sinks)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    term = scatter_tokens(joined_heads(out, weights.out), mesh.tp)
    if isinstance(weights, Attention) and weights.out_bias is not None:
        term = term + weights.out_bias[None].astype(term.dtype)
    return norm_after(term, weights.norm, weights.out_norm, config)


def norm_before(
    x: Float[Array, "local d_model"], norm: Float[Array, "d_model"], config: ModelConfig
) -> Float[Array, "local d_model"]:
    """What attention or a feed-forward layer takes of the residual stream."""
    return x if config.norm_placement == "after" else rms_norm(x, norm, config.norm_epsilon)


def norm_after(
    term: Float[Array, "local d_model"],
    norm: Float[Array, "d_model"],
    out_norm: Float[Array, "d_model"] | None,
    config: ModelConfig,
) -> Float[Array, "local d_model"]:
    """What is added to the residual stream of what attention or a feed-forward layer gives."""
    if config.norm_placement == "before":
        return term
    # Kept as the stream is: no backward pass repeats the collective that made it.
    term, own = checkpoint_name(term, STREAM), norm if out_norm is None else out_norm
    return rms_norm(term, own, config.norm_epsilon)
