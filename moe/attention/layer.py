"""Grouped-query attention with rotary positions, heads spread over ``tp``.

The residual stream is a shard of the flattened tokens on each ``tp`` rank; the layer gathers the
tokens, works on its own heads and scatters the sum back. What lies between keys and queries is
passed in as `attend`, so that training (all positions at once, spread over ``cp``) and decoding (a
cache) are one layer.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention.projections import queries_keys_values
from moe.config import ModelConfig
from moe.norms import rms_norm
from moe.weights import Attention, LatentAttention
from sharding.collectives import gather_tokens, scatter_tokens
from sharding.folding import FoldedMesh

NOTHING = -1e30
"""Score of what is not visible or not counted. The lowest float would make rows without anything
visible NaN after the subtraction of their maximum in lower precisions; a large finite number never
does."""


@runtime_checkable
class Attend(Protocol):
    """(queries, keys, values) of the gathered tokens -> what each query reads.

    Values may be narrower or wider than keys; `scale` multiplies the scores, None is
    ``head_dim**-0.5``.
    """

    def __call__(
        self, query: Array, key: Array, value: Array, scale: float | None = None
    ) -> Array: ...


def attention(
    weights: Attention[Array] | LatentAttention[Array],
    x: Float[Array, "local d_model"],
    positions: Int[Array, "token"],
    attend: Attend,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Float[Array, "local d_model"]:
    """The attention term of a block, for this rank's shard of the tokens.

    Communication per device: one `gather_tokens` and one `scatter_tokens` over ``tp``, each of
    ``tokens x d_model (tp - 1) / tp`` elements, of the tokens of a ``cp`` rank; `attend` adds what
    `moe.attention.context` says.

    Args:
      x: the residual stream, sharded over ``cp`` and ``tp`` along the flattened tokens.
      positions: place in its own sequence of each gathered token, from 0 (the tokens of this
        ``cp`` rank).
      attend: reads the values; sees the heads of this rank only.
    """
    h = rms_norm(x, weights.norm, config.norm_epsilon)
    h = gather_tokens(h, mesh.tp)
    read = attend(*queries_keys_values(weights, h, positions, config, mesh))
    out = jnp.einsum("nhk,hkd->nd", read, weights.out.astype(h.dtype))
    return scatter_tokens(out, mesh.tp)


def read_values(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    visible: Bool[Array, "batch time source"],
    scale: float | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """``softmax(scale q k) v`` over the visible positions.

    Scores, softmax and both sums are float32 whatever the arrays are; its weights, and the result,
    are rounded to the dtype of `value`.

    Query head ``h`` reads key/value head ``h // (heads / kv_heads)``. A query that sees nothing
    (padding) reads the plain mean: finite, and used by nobody.

    Args:
      scale: multiplies the scores; None is ``head_dim**-0.5``.
    """
    batch, time, heads, _ = query.shape
    scores = scaled_scores(query, key, scale)
    scores = jnp.where(visible[:, None, None], scores, NOTHING)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    read = jnp.einsum(
        "bvgts,bsvk->btvgk", weights, value, preferred_element_type=jnp.float32
    ).astype(value.dtype)
    return read.reshape(batch, time, heads, value.shape[-1])


def scaled_scores(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    scale: float | None,
) -> Float[Array, "batch kv_heads group time source"]:
    """``scale q k`` summed in float32 and never rounded, the query heads of a key/value head
    together."""
    batch, time, _, head_dim = query.shape
    query = query.reshape(batch, time, key.shape[2], -1, head_dim)
    scores = jnp.einsum("btvgk,bsvk->bvgts", query, key, preferred_element_type=jnp.float32)
    return scores * (head_dim**-0.5 if scale is None else scale)


def causal(valid: Bool[Array, "batch time"]) -> Bool[Array, "batch time time"]:
    """Which earlier or equal positions each position may read: those that are not padding."""
    time = valid.shape[1]
    order = jnp.arange(time)
    return valid[:, None, :] & (order[:, None] >= order[None, :])[None]
