"""Multi-head latent attention (MLA): keys and values are expanded from one latent vector per token.

``c = norm(h W_c)``, ``[k_h ; v_h] = c W_h``; the rotary part of a key, ``r = rope(h W_r)``, is
shared by all heads and concatenated to each ``k_h``. Queries may come from a latent vector of their
own. The latent vectors are computed on every ``tp`` rank, without communication.

Training expands them. Decoding need not: with ``W_h = [K_h V_h]`` a score is
``q_h (c K_h)^T = (q_h K_h^T) c^T``, and the output of a query is ``sum p (c V_h) = (sum p c) V_h``.
So the matrices are absorbed into the query and the output, a cache holds ``[c ; r]`` alone, and all
heads attend to it as to one head.

References:
  DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.2, eq. 37 to 47. https://arxiv.org/abs/2405.04434
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moe.adapters import Matrix, matmul, product
from moe.attention.projections import Heads, heads, scale_queries
from moe.attention.rotary import Positions, apply_rotary
from moe.config import ModelConfig, MultiHeadLatentAttention
from moe.ops.precision import rms_norm
from moe.remat import PROJECTED
from moe.weights import LatentAttention

Narrow = Float[Array, "token narrow"]
Up = Float[Array, "rank heads width"]

IMPLEMENTATIONS = ("absorbed", "expanded")


@dataclass(frozen=True)
class LatentCore:
    """Core attention that takes latent vectors and the matrix that expands them.

    Args:
      attend: (queries, ``[c ; r]`` of the tokens, `up` of the weights) -> output of each query.
    """

    attend: Callable[[Heads, Narrow, Up], Heads]


def caches_latent(config: ModelConfig) -> bool:
    """True if the KV cache holds latent vectors instead of expanded keys and values.

    Raises:
      ValueError: on an unknown name.
    """
    name = config.execution.latent
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"execution.latent={name!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, "
            "or None for the best that applies."
        )
    return config.mla is not None and name != "expanded"


def queries(
    weights: LatentAttention[Array],
    h: Float[Array, "token d_model"],
    positions: Positions,
    config: ModelConfig,
) -> Heads:
    """Queries of the heads of this ``tp`` rank, with rotary positions on their last elements."""
    narrow = h
    if weights.query_down is not None and weights.query_norm is not None:
        narrow = checkpoint_name(product(matmul, h, weights.query_down), PROJECTED)
        narrow = rms_norm(narrow, weights.query_norm, config.norm_epsilon)
    query, content = heads(narrow, weights.query), _content_dim(config)
    if weights.query_down is None:
        query = checkpoint_name(query, PROJECTED)
    rotated = apply_rotary(query[..., content:], positions, config, 0)
    return scale_queries(jnp.concatenate([query[..., :content], rotated], axis=-1), config)


def latent_vectors(
    weights: LatentAttention[Array],
    h: Float[Array, "token d_model"],
    positions: Positions,
    config: ModelConfig,
) -> Narrow:
    """Latent vector ``[c ; r]`` of each token."""
    rank = _mla(config).kv_lora_rank
    down = checkpoint_name(product(matmul, h, weights.down), PROJECTED)
    # All layers with latent attention have the same rotary settings.
    shared = apply_rotary(down[:, None, rank:], positions, config, 0)[:, 0]
    content = rms_norm(down[:, :rank], weights.down_norm, config.norm_epsilon)
    return jnp.concatenate([content, shared], axis=-1)


def expand_latent(narrow: Narrow, up: Up | Matrix, config: ModelConfig) -> tuple[Heads, Heads]:
    """Keys and values of each head, expanded from latent vectors."""
    rank, content = _mla(config).kv_lora_rank, _content_dim(config)
    both, shared = heads(narrow[:, :rank], up), narrow[:, None, rank:]
    shared = jnp.broadcast_to(shared, (*both.shape[:2], shared.shape[-1]))
    return jnp.concatenate([both[..., :content], shared], axis=-1), both[..., content:]


def absorb_keys(query: Heads, up: Up, config: ModelConfig) -> Heads:
    """Queries whose products with latent vectors equal the products of `query` with expanded
    keys."""
    content = _content_dim(config)
    matrix = up[..., :content].astype(query.dtype)
    absorbed = jnp.einsum("nhk,rhk->nhr", query[..., :content], matrix)
    return jnp.concatenate([absorbed, query[..., content:]], axis=-1)


def project_values(read: Float[Array, "token heads rank"], up: Up, config: ModelConfig) -> Heads:
    """Attention output over values, from the weighted sum of latent vectors."""
    matrix = up[..., _content_dim(config) :].astype(read.dtype)
    return jnp.einsum("nhr,rhk->nhk", read, matrix)


def _mla(config: ModelConfig) -> MultiHeadLatentAttention:
    assert config.mla is not None  # the table gives these weights only with it
    return config.mla


def _content_dim(config: ModelConfig) -> int:
    return config.head_dim - _mla(config).qk_rope_head_dim
