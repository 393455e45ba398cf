"""Chunks of the LM head's columns, one column per token of the vocabulary.

Each ``tp`` rank loops over its columns, `Execution.vocab_chunk` at a time, with the states of all
tokens of its ``tp`` group. Sums over ranks are the caller's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.adapters import Adapted
from moe.config import Model, ModelConfig
from moe.ops.precision import MASK_VALUE
from moe.weights import Transformer
from sharding.collectives import Axes, gather_tokens, match_varying, vary
from sharding.folding import FoldedMesh

Carry = TypeVar("Carry")


class Operands(NamedTuple):
    """States and tokens of the ``tp`` group, and the columns of this rank.

    Attributes:
      x: ``[token, d_model]``.
      columns: ``[d_model, column]``.
      tokens: ``[token]``, counted from the first column; None if no token is looked up.
      skipped: number of leading columns that the rank before computes.
      used: ``[column]`` true if a token has the column's id; None if all have one.
    """

    x: Array
    columns: Array
    tokens: Array | None
    skipped: Array
    used: Array | None


def operands_of(
    x: Float[Array, "local inner"],
    head: Float[Array, "inner columns"],
    tokens: Int[Array, "local"] | None,
    used: Bool[Array, "vocab"] | None,
    model: Model,
) -> Operands:
    """Operands of this rank from its `states_and_head`, its tokens and the `used_ids` of all."""
    mesh = model.mesh
    columns, start, skipped = local_columns(head, model.config.vocab_size, mesh)
    # Every rank needs all tokens of the tp group, as it has other columns.
    x = gather_tokens(x, mesh.tp)
    if tokens is not None:
        tokens = gather_tokens(tokens, mesh.tp) - start
    if used is not None:
        used = lax.dynamic_slice_in_dim(vary(used, mesh.tp), start, columns.shape[1])
    return Operands(*vary((x, columns, tokens, skipped, used), mesh.axes))


def used_ids(config: ModelConfig) -> Bool[Array, "vocab"] | None:
    """True for each id that a token has; None if all have one, so that nothing is computed."""
    if not config.unused_ids:
        return None
    used = np.ones(config.vocab_size, bool)
    for first, end in config.unused_ids:
        used[first:end] = False
    return jnp.asarray(used)


def states_and_head(
    weights: Transformer[Array], x: Float[Array, "local d_model"], config: ModelConfig
) -> tuple[Float[Array, "local inner"], Float[Array, "inner columns"]]:
    """States and this device's columns of the LM head; their product is the logits.

    With adapters that is ``[x ; s x A] [W ; B]``, one product for both.
    """
    if config.head == "value":
        raise ValueError('head="value" has no logits: this is a critic; use `values`.')
    if weights.head is None:
        return x, weights.embedding.T
    if not isinstance(weights.head, Adapted):
        return x, weights.head
    head = weights.head
    narrow = x @ head.a.astype(x.dtype) * head.scale
    both = jnp.concatenate([head.base, head.b.astype(head.base.dtype)])
    return jnp.concatenate([x, narrow], axis=1), both


def local_columns(
    head: Float[Array, "d_model columns"], vocab_size: int, mesh: FoldedMesh
) -> tuple[Float[Array, "d_model local_columns"], Int[Array, ""], Int[Array, ""]]:
    """Vocabulary columns that this ``tp`` rank computes, equally many on every rank.

    If ``tp`` does not divide the vocabulary, the last ranks start earlier and skip the columns that
    the rank before computes.

    Returns:
      The columns, the token id of the first one, and the number of columns to skip.
    """
    width = -(-vocab_size // mesh.size(mesh.tp))
    first = lax.axis_index(mesh.tp) * width
    start = jnp.minimum(first, vocab_size - width)
    if head.shape[1] > width:
        head = lax.dynamic_slice_in_dim(vary(head, mesh.tp), start, width, axis=1)
    return head, start, first - start


class Chunking(NamedTuple):
    """Chunking of the vocabulary columns: the mesh axes that shard them, the columns per chunk, and
    the temperature."""

    axes: Axes
    chunk: int | None
    temperature: float


class Chunk(NamedTuple):
    """Columns whose logits are computed together.

    Attributes:
      start: index of the first column among this rank's columns.
      matrix: ``[d_model, chunk]``.
      logits: ``[token, chunk]``, `MASK_VALUE` in columns that another chunk or rank counts, and of
        ids that no token has.
      is_target: ``[token, chunk]`` true in the column of the token, if it is counted here.
    """

    start: Array
    matrix: Array
    logits: Array
    is_target: Array


def chunk_at(
    operands: Operands, chunking: Chunking, index: int | Array, saved_logits: Array | None = None
) -> Chunk:
    """Chunk `index`, with its saved logits if there are any. If chunks do not divide the columns,
    the last starts earlier, so that all have one size."""
    x, columns, tokens, skipped, used = operands
    size = _chunk_size(columns, chunking)
    start = jnp.minimum(index * size, columns.shape[1] - size)
    matrix = lax.dynamic_slice_in_dim(columns, start, size, axis=1).astype(x.dtype)
    logits = logits_of_columns(x, matrix, chunking) if saved_logits is None else saved_logits
    column = (start + jnp.arange(size))[None]
    counted = column >= jnp.maximum(index * size, skipped)
    is_target = jnp.zeros_like(counted)
    if tokens is not None:
        is_target = counted & (column == tokens[:, None])
    if used is not None:
        counted = counted & lax.dynamic_slice_in_dim(used, start, size)[None]
    return Chunk(start, matrix, jnp.where(counted, logits, MASK_VALUE), is_target)


def logits_of_columns(x: Array, matrix: Array, chunking: Chunking) -> Array:
    return product(x, matrix.astype(x.dtype)) / chunking.temperature


def fold_chunks(
    step: Callable[[Carry, int | Array], Carry], carry: Carry, columns: Array, chunking: Chunking
) -> Carry:
    """Folds `step` over the indices of the chunks."""
    count = num_chunks(columns, chunking)
    if count == 1:
        return step(carry, 0)
    return lax.scan(lambda carry, i: (step(carry, i), None), carry, jnp.arange(count))[0]


def fold_gradients(
    step: Callable[[int | Array], tuple[Chunk, Array]], operands: Operands, chunking: Chunking
) -> Operands:
    """Gradients of states and columns, from `step`'s chunks and gradients of their logits."""
    x, columns = operands.x, operands.columns

    def add(sums: tuple[Array, Array], index: int | Array) -> tuple[Array, Array]:
        x_gradient, columns_gradient = sums
        chunk, logits_gradient = step(index)
        # Rounded to the dtype of the states: two products of that dtype follow.
        logits_gradient = (logits_gradient / chunking.temperature).astype(x.dtype)
        matrix_gradient = product(x.T, logits_gradient).astype(columns.dtype)
        # The last chunk may overlap the one before: its gradient is 0 in the columns of that.
        so_far = lax.dynamic_slice_in_dim(
            columns_gradient, chunk.start, matrix_gradient.shape[1], axis=1
        )
        columns_gradient = lax.dynamic_update_slice(
            columns_gradient, so_far + matrix_gradient, (0, chunk.start)
        )
        return x_gradient + product(logits_gradient, chunk.matrix.T), columns_gradient

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros(columns.shape, columns.dtype)
    x_gradient, columns_gradient = fold_chunks(add, match_varying(zeros, x), columns, chunking)
    constants: Any = {"tokens": None, "skipped": None, "used": None}
    return operands._replace(x=x_gradient.astype(x.dtype), columns=columns_gradient, **constants)


def num_chunks(columns: Array, chunking: Chunking) -> int:
    return -(-columns.shape[1] // _chunk_size(columns, chunking))


def _chunk_size(columns: Array, chunking: Chunking) -> int:
    return columns.shape[1] if chunking.chunk is None else min(chunking.chunk, columns.shape[1])


def product(x: Float[Array, "a b"], matrix: Float[Array, "b c"]) -> Float[Array, "a c"]:
    return jnp.dot(x, matrix, preferred_element_type=jnp.float32)
