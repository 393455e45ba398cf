"""Token embedding, the start of the residual stream.

Its rows, one per token of the vocabulary, are sharded over ``tp`` if it divides them
(vocab-parallel, in Megatron's words); otherwise every rank has all of them and looks up its own
tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.collectives import local_shard, match_varying, scatter_tokens, vary
from sharding.folding import FoldedMesh


def embed(
    weights: Transformer[Array], tokens: Int[Array, "token"], config: ModelConfig, mesh: FoldedMesh
) -> Float[Array, "local d_model"]:
    """Embeds tokens: the residual stream of this rank's shard of the flattened tokens.

    With sharded rows each ``tp`` rank finds some of the tokens of its ``cp`` rank and gives zeros
    for the others; the sum over ranks is one number and zeros, which is exact.

    Communication per device if the rows are sharded: one `scatter_tokens` over ``tp``, backward one
    `gather_tokens`, of ``tokens x d_model (tp - 1) / tp`` elements each, for the tokens of a ``cp``
    rank. Otherwise none.

    Args:
      tokens: ids, all those of the sequence-parallel group, on each of its devices.

    References:
      Shoeybi et al., "Megatron-LM", 2019, section 3 (the input embedding, parallel over the
      vocabulary). https://arxiv.org/abs/1909.08053
    """
    # The table starts with variance 1 / d_model, right for a tied head; the residual stream
    # starts with 1.
    scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
    num_rows = weights.embedding.shape[0]
    if num_rows == config.vocab_size:
        tokens = vary(local_shard(tokens, mesh.sequence), mesh.axes)
        return (lookup(weights.embedding, tokens) * scale).astype(config.dtype)
    tokens = vary(local_shard(tokens, mesh.cp), mesh.axes)
    row = tokens - lax.axis_index(mesh.tp).astype(tokens.dtype) * num_rows
    # Past the end the lookup gives zeros and no gradient; a negative index would count from the
    # end.
    row = jnp.where(row < 0, num_rows, row)
    rows = lookup(weights.embedding, row)
    return scatter_tokens((rows * scale).astype(config.dtype), mesh.tp)


def lookup(
    table: Float[Array, "vocab d_model"], tokens: Int[Array, "token"]
) -> Float[Array, "token d_model"]:
    """Looks up ``table[tokens]``, float32; zeros without a gradient for ids past the end.

    The gradient of a row is the sum over the tokens with its id, in float32 and rounded to the
    dtype of the table once: for a frequent token a sum in bfloat16 would stop growing.
    """
    table, tokens = match_varying((table, tokens))
    return _lookup(table, tokens, table.shape, table.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Array, tokens: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return _forward(table, tokens, shape, dtype)[0]


def _forward(
    table: Array, tokens: Array, shape: tuple[int, ...], dtype: Any
) -> tuple[Array, Array]:
    rows = table.at[tokens].get(mode="fill", fill_value=0)
    return rows.astype(jnp.float32), tokens


def _backward(
    shape: tuple[int, ...], dtype: Any, tokens: Array, gradient: Array
) -> tuple[Array, None]:
    zeros = match_varying(jnp.zeros(shape, jnp.float32), gradient)
    return zeros.at[tokens].add(gradient, mode="drop").astype(dtype), None


_lookup.defvjp(_forward, _backward)
