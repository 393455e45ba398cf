"""LM head and value head: logits, log-probabilities and entropies from the last hidden states.

The columns of the LM head, one per token of the vocabulary, are sharded over ``tp`` if it divides
them, columns of a tied embedding too; otherwise every rank has all and computes its part. Training
computes logits in chunks of columns (a fused linear cross-entropy, in Liger's words); sampling
needs all logits of its local tokens.

Logits of `ModelConfig.unused_ids`, the ids of a padded vocabulary that no token has, are
`MASK_VALUE` in all of them: a probability of 0, and no gradient.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.config import Model, ModelConfig
from moe.head.chunks import (
    Chunking,
    Operands,
    chunk_at,
    fold_chunks,
    fold_gradients,
    logits_of_columns,
    num_chunks,
    operands_of,
    product,
    states_and_head,
    used_ids,
)
from moe.ops.precision import MASK_VALUE, float32_product
from moe.weights import Transformer
from sharding.collectives import gather_tokens, local_shard, match_varying, swap_shards


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
    x, head = states_and_head(weights, x, config)
    if head.shape[1] == config.vocab_size:
        logits = product(x, head.astype(x.dtype))
    else:
        columns = product(gather_tokens(x, model.mesh.tp), head.astype(x.dtype))
        logits = swap_shards(columns, model.mesh.tp, split=0, join=1)
    used = used_ids(config)
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
    chunking = Chunking(model.mesh.tp, model.config.execution.vocab_chunk, temperature)
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
    chunking = Chunking(mesh.tp, model.config.execution.vocab_chunk, 1.0)

    def add(maxima: tuple[Array, Array], index: int | Array) -> tuple[Array, Array]:
        chunk = chunk_at(operands, chunking, index, None)
        target_logit = jnp.max(chunk.logits, axis=1, where=chunk.is_target, initial=MASK_VALUE)
        return jnp.maximum(maxima[0], jnp.max(chunk.logits, axis=1)), jnp.maximum(
            maxima[1], target_logit
        )

    empty = jnp.full(operands.x.shape[:1], MASK_VALUE, jnp.float32)
    empty = match_varying(empty, operands.x)
    maxima = fold_chunks(add, (empty, empty), operands.columns, chunking)
    highest, target_logit = (lax.pmax(logit, mesh.tp) for logit in maxima)
    return local_shard(target_logit >= highest, mesh.tp)


def _operands(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    tokens: Int[Array, "local"],
    model: Model,
) -> Operands:
    x, head = states_and_head(weights, x, model.config)
    return operands_of(x, head, tokens, used_ids(model.config), model)


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
    one_chunk = num_chunks(columns, chunking) == 1
    saved_logits = logits_of_columns(x, columns, chunking) if one_chunk else None

    # Online softmax: a chunk may raise the maximum, and the sums so far are made relative to it.
    def add(sums: _Sums, index) -> _Sums:
        chunk = chunk_at(operands, chunking, index, saved_logits)
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
    sums = fold_chunks(add, _Sums(zeros + MASK_VALUE, zeros, zeros, zeros), columns, chunking)
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
    maximum, log_total, entropy = (per_token[:, None] for per_token in rest)
    logprob_gradient, entropy_gradient = (gradient[:, None] for gradient in gradients)

    # Logits are recomputed, unless there is one chunk, whose logits were saved.
    def step(index):
        chunk = chunk_at(operands, chunking, index, saved_logits)
        log_p = chunk.logits - maximum - log_total
        p = jnp.exp(log_p)
        logits_gradient = jnp.where(chunk.is_target, logprob_gradient, 0.0) - p * logprob_gradient
        return chunk, logits_gradient - entropy_gradient * (p * (log_p + entropy))

    return (fold_gradients(step, operands, chunking),)


_scores.defvjp(_forward, _backward)


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
