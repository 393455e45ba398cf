"""Divergence of a policy and its teacher over the whole vocabulary, from their last hidden states.

As of the log-probabilities of `moe.head`, a device computes the logits of a chunk of columns at a
time, of both networks, forward and backward.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from moe.config import Model, ModelConfig
from moe.head.chunks import (
    Chunk,
    Chunking,
    Operands,
    chunk_at,
    fold_chunks,
    fold_gradients,
    operands_of,
    states_and_head,
    used_ids,
)
from moe.ops.precision import MASK_VALUE
from moe.weights import Transformer
from sharding.collectives import Axes, gather_tokens, local_shard, match_varying


def divergence(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    teacher: Transformer[Array],
    teacher_x: Float[Array, "local d_teacher"],
    model: Model,
    teacher_config: ModelConfig,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
) -> Float[Array, "local"]:
    """Generalised Jensen-Shannon divergence of each token's distributions (`jrl.jsd_from_logits`).

    With ``p = softmax(x W / temperature)`` of the policy, q of the teacher and
    ``m = beta q + (1 - beta) p``:

    * `beta` 1: ``KL(p || q)``, of gradient ``p_v (log p_v/q_v - KL)`` by the logit of v;
    * `beta` 0: ``KL(q || p)``, of gradient ``p_v - q_v``;
    * between: ``beta KL(q || m) + (1 - beta) KL(p || m)``, of gradient
      ``(1 - beta) p_v (log p_v/m_v - KL(p || m))``.

    No array has a logit of each token and column. A device loops over chunks of its columns once,
    or twice for a `beta` between 0 and 1, and once more for the gradients, which only the policy
    has. A teacher equal to the policy gives exactly 0.

    Both distributions are over the ids that both networks use. Vocabularies of different size, as
    of one tokenizer padded twice, share their first columns; if ``tp`` shards the teacher's, its
    head is then gathered on every device.

    Communication per device over ``tp``: as of `moe.head.logprobs_and_entropy`, forward also the
    states of the teacher.

    Args:
      x, teacher_x: hidden states after the last norm of the same tokens, this rank's shard.
      teacher: weights on the mesh of `model`; no gradient.
      beta: weight of the teacher in the mixture, from 0 to 1.
      temperature: of the policy; positive.
      teacher_temperature: of the teacher; None takes the policy's.

    Returns:
      The divergence of each token, nats, float32. If a teacher's state is NaN, so is it, and a loss
      that leaves the token out has a finite gradient.

    Raises:
      ValueError: a network is a critic, or `beta` is outside of 0 to 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(
            f"beta={beta} is the teacher's weight in the mixture: give 0 (forward KL) to 1 "
            "(reverse KL)."
        )
    config, mesh = model.config, model.mesh
    x, head = states_and_head(weights, x, config)
    teacher, teacher_x = lax.stop_gradient((teacher, teacher_x))
    teacher_x, teacher_head = states_and_head(teacher, teacher_x, teacher_config)
    sizes = teacher_config.vocab_size, config.vocab_size
    teacher_head = _with_columns(teacher_head, *sizes, mesh.tp)
    used = _shared_ids(config, teacher_config)
    policy = operands_of(x, head, None, used, model)
    other = operands_of(teacher_x, teacher_head, None, used, model)
    chunking = Chunking(mesh.tp, config.execution.vocab_chunk, temperature)
    pair = _Pair(chunking, temperature if teacher_temperature is None else teacher_temperature)
    per_token: Any = _divergence(policy, other, pair, float(beta))
    return local_shard(per_token, mesh.tp)


def _shared_ids(config: ModelConfig, teacher: ModelConfig) -> Bool[Array, "vocab"] | None:
    """True for each id of the policy that both networks use; None for all."""
    used, of_teacher = used_ids(config), used_ids(teacher)
    missing = config.vocab_size - teacher.vocab_size
    if of_teacher is None and missing <= 0:
        return used
    if of_teacher is None:
        of_teacher = jnp.ones(teacher.vocab_size, bool)
    of_teacher = jnp.pad(of_teacher[: config.vocab_size], (0, max(missing, 0)))
    return of_teacher if used is None else used & of_teacher


def _with_columns(
    head: Float[Array, "inner columns"], vocab_size: int, wanted: int, axes: Axes
) -> Float[Array, "inner wanted"]:
    """A head of `vocab_size` columns, sharded or whole, with the first `wanted` of them or with
    columns of 0 appended."""
    if vocab_size == wanted:
        return head
    if head.shape[1] < vocab_size:
        head = gather_tokens(head.T, axes).T
    return jnp.pad(head[:, :wanted], ((0, 0), (0, max(wanted - vocab_size, 0))))


class _Pair(NamedTuple):
    """Chunking of the columns of both networks, which differ in temperature."""

    chunking: Chunking
    teacher_temperature: float

    def chunks(
        self, policy: Operands, teacher: Operands, index: int | Array
    ) -> tuple[Chunk, Chunk]:
        of_teacher = self.chunking._replace(temperature=self.teacher_temperature)
        return chunk_at(policy, self.chunking, index), chunk_at(teacher, of_teacher, index)


class _Sums(NamedTuple):
    """Sums over columns, ``[token]`` each, of logits y of one distribution and z of the other.

    Attributes:
      first, second: the largest logits, a and b.
      first_total, second_total: ``sum exp(y - a)`` and ``sum exp(z - b)``.
      moment: ``sum exp(y - a) ((y - a) - (z - b))``.
    """

    first: Array
    second: Array
    first_total: Array
    second_total: Array
    moment: Array

    def rebase(self, first: Array, second: Array) -> "_Sums":
        """The same sums relative to larger maxima."""
        down, other = self.first - first, self.second - second
        scale = jnp.exp(down)
        moment = (self.moment + (down - other) * self.first_total) * scale
        total = self.second_total * jnp.exp(other)
        return _Sums(first, second, self.first_total * scale, total, moment)


class _Normalisers(NamedTuple):
    """Of both, ``[token]`` each: ``log p = (z - maximum) - log_total``."""

    maximum: Array
    log_total: Array
    teacher_maximum: Array
    teacher_log_total: Array

    def logprobs(self, policy: Chunk, teacher: Chunk) -> tuple[Array, Array]:
        maximum, log_total, teacher_maximum, teacher_log_total = (x[:, None] for x in self)
        log_p = policy.logits - maximum - log_total
        return log_p, teacher.logits - teacher_maximum - teacher_log_total


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _divergence(policy, teacher, pair, beta):
    return _forward(policy, teacher, pair, beta)[0]


def _forward(policy, teacher, pair, beta):
    normalisers, kl = _one_sided(policy, teacher, pair, beta)
    result = of_policy = kl
    if 0 < beta < 1:
        result, of_policy = _mixed(policy, teacher, pair, beta, normalisers)
    return jnp.maximum(result, 0), (policy, teacher, normalisers, of_policy)


def _one_sided(policy, teacher, pair: _Pair, beta) -> tuple[_Normalisers, Array]:
    """Normalisers, and ``KL(q || p)`` for a `beta` of 0, else ``KL(p || q)``, in one loop."""

    def add(sums: _Sums, index) -> _Sums:
        first, second = (chunk.logits for chunk in pair.chunks(policy, teacher, index))
        if beta == 0:
            first, second = second, first
        first_maximum = jnp.maximum(sums.first, jnp.max(first, axis=1))
        second_maximum = jnp.maximum(sums.second, jnp.max(second, axis=1))
        sums = sums.rebase(first_maximum, second_maximum)
        first, second = first - first_maximum[:, None], second - second_maximum[:, None]
        exponentials = jnp.exp(first)
        return _Sums(
            first_maximum,
            second_maximum,
            sums.first_total + jnp.sum(exponentials, axis=1),
            sums.second_total + jnp.sum(jnp.exp(second), axis=1),
            sums.moment + jnp.sum(exponentials * (first - second), axis=1),
        )

    zeros = match_varying(jnp.zeros(policy.x.shape[0], jnp.float32), policy.x, teacher.x)
    empty = _Sums(zeros + MASK_VALUE, zeros + MASK_VALUE, zeros, zeros, zeros)
    sums = fold_chunks(add, empty, policy.columns, pair.chunking)
    axes = pair.chunking.axes
    first, second = (lax.pmax(maximum, axes) for maximum in (sums.first, sums.second))
    first_total, second_total, moment = lax.psum(jnp.stack(sums.rebase(first, second)[2:]), axes)
    of_first, of_second = (first, jnp.log(first_total)), (second, jnp.log(second_total))
    kl = moment / first_total - of_first[1] + of_second[1]
    pairs = (of_second, of_first) if beta == 0 else (of_first, of_second)
    return _Normalisers(*pairs[0], *pairs[1]), kl


def _mixed(policy, teacher, pair: _Pair, beta, normalisers: _Normalisers) -> tuple[Array, Array]:
    """The divergence of a `beta` between 0 and 1, and ``KL(p || m)``."""

    def add(sums: Array, index) -> Array:
        log_p, log_q = normalisers.logprobs(*pair.chunks(policy, teacher, index))
        over_p, over_q = _over_mixture(log_p, log_q, beta)
        of_policy = jnp.sum(jnp.exp(log_p) * over_p, axis=1)
        of_teacher = jnp.sum(jnp.exp(log_q) * over_q, axis=1)
        return sums + jnp.stack([of_policy, of_teacher])

    zeros = jnp.zeros((2, policy.x.shape[0]), jnp.float32)
    zeros = match_varying(zeros, policy.x, teacher.x)
    sums = fold_chunks(add, zeros, policy.columns, pair.chunking)
    of_policy, of_teacher = lax.psum(sums, pair.chunking.axes)
    return beta * of_teacher + (1 - beta) * of_policy, of_policy


def _over_mixture(log_p: Array, log_q: Array, beta: float) -> tuple[Array, Array]:
    """``log p/m`` and ``log q/m``, by the larger of p and q, whose ratio to m is bounded."""
    difference = log_p - log_q
    larger = difference > 0
    share = jnp.where(larger, beta, 1 - beta)
    log_m = jnp.log1p(share * jnp.expm1(-jnp.abs(difference)))
    return jnp.minimum(difference, 0) - log_m, jnp.minimum(-difference, 0) - log_m


def _backward(pair, beta, residuals, gradient):
    policy, teacher, normalisers, of_policy = residuals
    of_policy, gradient = of_policy[:, None], gradient[:, None]

    def step(index):
        chunks = pair.chunks(policy, teacher, index)
        log_p, log_q = normalisers.logprobs(*chunks)
        p = jnp.exp(log_p)
        if beta == 0:
            slope = p - jnp.exp(log_q)
        elif beta == 1:
            slope = p * (log_p - log_q - of_policy)
        else:
            slope = (1 - beta) * p * (_over_mixture(log_p, log_q, beta)[0] - of_policy)
        # A token that the loss leaves out may have a teacher of NaN.
        return chunks[0], jnp.where(gradient == 0, 0, slope * gradient)

    return fold_gradients(step, policy, pair.chunking), None


_divergence.defvjp(_forward, _backward)
