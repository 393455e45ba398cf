"""LM head and value head: logits, log-probabilities and entropies from the last hidden states.

The columns of the LM head, one per token of the vocabulary, are sharded over ``tp`` if it divides
them, columns of a tied embedding too; otherwise every rank has all and computes its part. Training
computes logits in chunks of columns (a fused linear cross-entropy, in Liger's words); sampling
needs all logits of its local tokens.

Logits of `ModelConfig.unused_ids`, the ids of a padded vocabulary that no token has, are
`MASK_VALUE` in all of them: a probability of 0, and no gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.adapters import Adapted
from moe.config import Model, ModelConfig
from moe.ops.precision import MASK_VALUE, float32_product
from moe.weights import Transformer
from sharding.collectives import (
    Axes,
    gather_tokens,
    local_shard,
    match_varying,
    swap_shards,
    vary,
)
from sharding.folding import FoldedMesh

Carry = TypeVar("Carry")


def logits_of(
    weights: Transformer[Array], x: Float[Array, "local d_model"], model: Model
) -> Float[Array, "local vocab"]:
    """Logits ``x W`` over the full vocabulary, float32, of this rank's shard of the tokens.

    Communication per device if the columns are sharded over ``tp``: one `gather_tokens` of the
    states, and one `swap_shards` that sends ``(tp - 1) / tp`` of ``tokens x vocab / tp`` logits, of
    the tokens of a ``cp`` rank. Else none.

    Args:
      x: hidden states after the last norm, sharded over ``cp`` and ``tp``.

    Returns:
      ``[local, vocab]``, in the order of `x`.

    Raises:
      ValueError: the network is a critic.
    """
    config = model.config
    x, head = _head(weights, x, config)
    if head.shape[1] == config.vocab_size:
        logits = _dot(x, head.astype(x.dtype))
    else:
        columns = _dot(gather_tokens(x, model.mesh.tp), head.astype(x.dtype))
        logits = swap_shards(columns, model.mesh.tp, split=0, join=1)
    used = _used_ids(config)
    return logits if used is None else jnp.where(used[None], logits, MASK_VALUE)


def logprobs_and_entropy(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "local"],
    model: Model,
    temperature: float = 1.0,
) -> tuple[Float[Array, "local"], Float[Array, "local"]]:
    """``log p_a`` and ``H = -sum_v p_v log p_v`` of ``p = softmax(z)``, ``z = x W / temperature``.

    A device computes ``[tokens, chunk]`` logits z at a time, forward and backward, of the tokens
    of its ``cp`` rank and of `Execution.vocab_chunk` columns. Each ``tp`` rank loops over its
    columns once for the maximum, ``sum exp z`` and ``sum z exp z``, and a second time for the
    gradients

    * ``d log p_a / d z_v = 1[v = a] - p_v``,
    * ``d H / d z_v = -p_v (log p_v + H)``.

    If all columns are one chunk, its logits are saved for the gradients: they take as much memory
    as the gradients of the logits, which a loss computes next.

    Products are summed, and all else is computed, in float32. The reference implementation is
    `logits_of` with a softmax over all logits.

    Communication per device over ``tp``: forward one `gather_tokens` of the states, ``tokens x
    d_model (tp - 1) / tp`` elements, and for each token its id, a maximum and a sum of three
    numbers; backward one `scatter_tokens` as large as the first, and a sum of two numbers.

    Args:
      x: hidden states after the last norm, this rank's shard.
      tokens: the token ``a`` of each state, in ``[0, vocab)``. One of `ModelConfig.unused_ids` has
        a log-probability of about `MASK_VALUE`.
      temperature: positive.

    Returns:
      Log-probabilities and entropies, nats, float32.

    Raises:
      ValueError: the network is a critic.

    References:
      Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (merging the sums of
      chunks). https://arxiv.org/abs/1805.02867
    """
    chunking = _Chunking(model.mesh.tp, model.config.execution.vocab_chunk, temperature)
    scores: Any = _scores(_operands(weights, x, tokens, model), chunking)
    local_scores = local_shard(jnp.stack(scores, axis=1), model.mesh.tp)
    return local_scores[:, 0], local_scores[:, 1]


def is_argmax(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "local"],
    model: Model,
) -> Bool[Array, "local"]:
    """True where the given token is the argmax: no token of the vocabulary has a higher logit.

    One loop over the columns, in chunks as in `logprobs_and_entropy`, without gradients.

    Communication per device over ``tp``: one `gather_tokens` of the states, and for each token its
    id, a maximum and a number.

    Args:
      x, tokens: as of `logprobs_and_entropy`.

    Raises:
      ValueError: the network is a critic.
    """
    mesh = model.mesh
    operands = _operands(weights, x, tokens, model)
    chunking = _Chunking(mesh.tp, model.config.execution.vocab_chunk, 1.0)

    def add(maxima: tuple[Array, Array], index: int | Array) -> tuple[Array, Array]:
        chunk = _chunk(operands, chunking, index, None)
        target_logit = jnp.max(chunk.logits, axis=1, where=chunk.is_target, initial=MASK_VALUE)
        return jnp.maximum(maxima[0], jnp.max(chunk.logits, axis=1)), jnp.maximum(
            maxima[1], target_logit
        )

    empty = jnp.full(operands.tokens.shape, MASK_VALUE, jnp.float32)
    empty = match_varying(empty, operands.x)
    maxima = _fold_chunks(add, (empty, empty), operands.columns, chunking)
    highest, target_logit = (lax.pmax(logit, mesh.tp) for logit in maxima)
    return local_shard(target_logit >= highest, mesh.tp)


class _Operands(NamedTuple):
    """States and tokens of the ``tp`` group, and the columns of this rank.

    Attributes:
      x: ``[token, d_model]``.
      columns: ``[d_model, column]``.
      tokens: ``[token]``, counted from the first column.
      skipped: number of leading columns that the rank before computes.
      used: ``[column]`` true if a token has the column's id; None if all have one.
    """

    x: Array
    columns: Array
    tokens: Array
    skipped: Array
    used: Array | None


def _operands(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "local"],
    model: Model,
) -> _Operands:
    config, mesh = model.config, model.mesh
    x, head = _head(weights, x, config)
    columns, start, skipped = _local_columns(head, config.vocab_size, mesh)
    # Every rank needs all tokens of the tp group, as it has other columns.
    x, tokens = gather_tokens(x, mesh.tp), gather_tokens(tokens, mesh.tp)
    used = _used_ids(config)
    if used is not None:
        used = lax.dynamic_slice_in_dim(vary(used, mesh.tp), start, columns.shape[1])
    return _Operands(*vary((x, columns, tokens - start, skipped, used), mesh.axes))


def _used_ids(config: ModelConfig) -> Bool[Array, "vocab"] | None:
    """True for each id that a token has; None if all have one, so that nothing is computed."""
    if not config.unused_ids:
        return None
    used = np.ones(config.vocab_size, bool)
    for first, end in config.unused_ids:
        used[first:end] = False
    return jnp.asarray(used)


def _head(
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


def _local_columns(
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


class _Chunking(NamedTuple):
    """Chunking of the vocabulary columns: the mesh axes that shard them, the columns per chunk, and
    the temperature."""

    axes: Axes
    chunk: int | None
    temperature: float


class _Chunk(NamedTuple):
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


class _Sums(NamedTuple):
    """Sums over columns, ``[token]`` each.

    Attributes:
      maximum: the largest logit, m.
      total: ``sum exp(z - m)``.
      moment: ``sum (z - m) exp(z - m)``.
      target_logit: the logit of the token; 0 if its column is not among these.
    """

    maximum: Array
    total: Array
    moment: Array
    target_logit: Array

    def rebase(self, maximum: Array) -> "_Sums":
        """The same sums relative to a larger maximum."""
        down = self.maximum - maximum
        scale = jnp.exp(down)
        moment = (self.moment + down * self.total) * scale
        return _Sums(maximum, self.total * scale, moment, self.target_logit)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scores(operands, chunking):
    return _forward(operands, chunking)[0]


def _forward(operands, chunking):
    x, columns, tokens = operands.x, operands.columns, operands.tokens
    saved_logits = _logits(x, columns, chunking) if _num_chunks(columns, chunking) == 1 else None

    # Online softmax: a chunk may raise the maximum, and the sums so far are made relative to it.
    def add(sums: _Sums, index) -> _Sums:
        chunk = _chunk(operands, chunking, index, saved_logits)
        maximum = jnp.maximum(sums.maximum, jnp.max(chunk.logits, axis=1))
        sums = sums.rebase(maximum)
        shifted = chunk.logits - maximum[:, None]
        exponentials = jnp.exp(shifted)
        return _Sums(
            maximum,
            sums.total + jnp.sum(exponentials, axis=1),
            sums.moment + jnp.sum(exponentials * shifted, axis=1),
            sums.target_logit + jnp.sum(chunk.logits, axis=1, where=chunk.is_target),
        )

    zeros = match_varying(jnp.zeros(tokens.shape, jnp.float32), x)
    sums = _fold_chunks(add, _Sums(zeros + MASK_VALUE, zeros, zeros, zeros), columns, chunking)
    # Over ranks as over chunks: sums relative to the maximum of all are added.
    maximum = lax.pmax(sums.maximum, chunking.axes)
    total, moment, target_logit = lax.psum(jnp.stack(sums.rebase(maximum)[1:]), chunking.axes)
    log_total = jnp.log(total)
    entropy = log_total - moment / total
    # Differences first: maximum and logarithm together would round large logits.
    logprob = target_logit - maximum - log_total
    return (logprob, entropy), (operands, saved_logits, maximum, log_total, entropy)


def _backward(chunking, residuals, gradients):
    operands, saved_logits, *rest = residuals
    x, columns = operands.x, operands.columns
    maximum, log_total, entropy = (per_token[:, None] for per_token in rest)
    logprob_gradient, entropy_gradient = (gradient[:, None] for gradient in gradients)

    # Logits are recomputed, unless there is one chunk, whose logits were saved.
    def add(sums, index):
        x_gradient, columns_gradient = sums
        chunk = _chunk(operands, chunking, index, saved_logits)
        log_p = chunk.logits - maximum - log_total
        p = jnp.exp(log_p)
        logits_gradient = jnp.where(chunk.is_target, logprob_gradient, 0.0) - p * logprob_gradient
        logits_gradient = logits_gradient - entropy_gradient * (p * (log_p + entropy))
        # Rounded to the dtype of the states: two products of that dtype follow.
        logits_gradient = (logits_gradient / chunking.temperature).astype(x.dtype)
        matrix_gradient = _dot(x.T, logits_gradient).astype(columns.dtype)
        # The last chunk may overlap the one before: its gradient is 0 in the columns of that.
        so_far = lax.dynamic_slice_in_dim(
            columns_gradient, chunk.start, matrix_gradient.shape[1], axis=1
        )
        columns_gradient = lax.dynamic_update_slice(
            columns_gradient, so_far + matrix_gradient, (0, chunk.start)
        )
        return x_gradient + _dot(logits_gradient, chunk.matrix.T), columns_gradient

    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros(columns.shape, columns.dtype)
    x_gradient, columns_gradient = _fold_chunks(add, match_varying(zeros, x), columns, chunking)
    integers = {"tokens": None, "skipped": None, "used": None}
    x_gradient = x_gradient.astype(x.dtype)
    return (operands._replace(x=x_gradient, columns=columns_gradient, **integers),)


_scores.defvjp(_forward, _backward)


def _chunk(
    operands: _Operands, chunking: _Chunking, index: int | Array, saved_logits: Array | None
) -> _Chunk:
    """Chunk `index`, with its saved logits if there are any. If chunks do not divide the columns,
    the last starts earlier, so that all have one size."""
    x, columns, tokens, skipped, used = operands
    size = _chunk_size(columns, chunking)
    start = jnp.minimum(index * size, columns.shape[1] - size)
    matrix = lax.dynamic_slice_in_dim(columns, start, size, axis=1).astype(x.dtype)
    logits = _logits(x, matrix, chunking) if saved_logits is None else saved_logits
    column = (start + jnp.arange(size))[None]
    counted = column >= jnp.maximum(index * size, skipped)
    is_target = counted & (column == tokens[:, None])
    if used is not None:
        counted = counted & lax.dynamic_slice_in_dim(used, start, size)[None]
    return _Chunk(start, matrix, jnp.where(counted, logits, MASK_VALUE), is_target)


def _logits(x: Array, matrix: Array, chunking: _Chunking) -> Array:
    return _dot(x, matrix.astype(x.dtype)) / chunking.temperature


def _fold_chunks(
    step: Callable[[Carry, int | Array], Carry], carry: Carry, columns: Array, chunking: _Chunking
) -> Carry:
    """Folds `step` over the indices of the chunks."""
    num_chunks = _num_chunks(columns, chunking)
    if num_chunks == 1:
        return step(carry, 0)
    return lax.scan(lambda carry, i: (step(carry, i), None), carry, jnp.arange(num_chunks))[0]


def _num_chunks(columns: Array, chunking: _Chunking) -> int:
    return -(-columns.shape[1] // _chunk_size(columns, chunking))


def _chunk_size(columns: Array, chunking: _Chunking) -> int:
    return columns.shape[1] if chunking.chunk is None else min(chunking.chunk, columns.shape[1])


def _dot(x: Float[Array, "a b"], matrix: Float[Array, "b c"]) -> Float[Array, "a c"]:
    return jnp.dot(x, matrix, preferred_element_type=jnp.float32)


def value_of(
    weights: Transformer[Array], x: Float[Array, "local d_model"], config: ModelConfig
) -> Float[Array, "local"]:
    """Critic value of each state, in full float32 precision on every device (no TF32).

    Raises:
      ValueError: the network is no critic.
    """
    if config.head != "value" or weights.head is None:
        raise ValueError(f'head={config.head!r} has no values: a critic needs head="value".')
    return float32_product(x.astype(jnp.float32), weights.head)
