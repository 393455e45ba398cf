"""Log-probabilities, entropy and KL divergence, computed exactly from logits."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, PerRow, as_floats, check_shapes, zero_masked
from jrl.losses.vocabulary import (
    Logits,
    Normaliser,
    RowMask,
    along,
    checked_chunk_size,
    chunk_of,
    contracted,
    log_normaliser,
    over_chunks,
    rows_of_logits,
    statistics,
)

__all__ = [  # noqa: RUF022 - in reading order
    "KLDirection",
    "entropy_from_logits",
    "kl_from_logits",
    "jsd_from_logits",
    "logprobs_from_logits",
]

KLDirection = Literal["policy||reference", "reference||policy"]


def logprobs_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    tokens: Integer[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Log-probabilities of given tokens, from the logits that predict them.

    ``z_token - log sum_v exp(z_v)``. Nothing is shifted: ``logits[b, t]`` must be the output that
    predicts ``tokens[b, t]``.

    Args:
      logits: unnormalised log-probabilities of every token of the vocabulary. -inf is a token of
        probability 0, which has no gradient.
      tokens: token ids, in ``0..vocab - 1``.
      mask: true where the result is needed. Results are 0 elsewhere for any `tokens`, without a
        gradient. None computes all.
      chunk_size: processes the vocabulary in chunks of this many entries, so that only one chunk of
        half-precision logits at a time is converted to float32. The result is the same up to
        rounding. None processes the vocabulary at once.

    Returns:
      Log-probabilities in nats, with their gradients; -inf for a token of probability 0.

    Raises:
      ValueError: if `chunk_size` is not positive.

    Examples:
      >>> logits = jnp.array([[0.0, 0.0, -jnp.inf], [1.0, 1.0, 1.0]])
      >>> logprobs_from_logits(logits, jnp.array([0, 2]), chunk_size=2).round(4).tolist()
      [-0.6930999755859375, -1.0986000299453735]
    """
    chunk_size = checked_chunk_size(chunk_size)
    logits, mask = rows_of_logits(logits, mask)
    check_shapes(tokens=tokens, rows_of_logits=mask)
    return _token_logprobs(chunk_size, logits, jnp.asarray(tokens), mask)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _token_logprobs(
    chunk_size: int | None, logits: Logits, tokens: Integer[Array, "*batch"], mask: RowMask
) -> PerRow:
    shift, log_sum = log_normaliser(chunk_size, logits, mask)
    (chosen,) = as_floats(jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0])
    return zero_masked(chosen - shift - log_sum, mask)


@_token_logprobs.defjvp
def _token_logprobs_jvp(chunk_size, primals, tangents):
    logits, tokens, mask = primals
    normaliser = log_normaliser(chunk_size, logits, mask)

    def slope(logits: Array, normaliser: Normaliser) -> Array:
        logprobs, possible = normaliser.logprobs(logits)
        entries = jnp.arange(logits.shape[-1], dtype=tokens.dtype)
        chosen = along(entries, logits) == tokens[..., None]
        return zero_masked(chosen.astype(logits.dtype) - jnp.exp(logprobs), possible)

    change = contracted(slope, tangents[0], mask, logits, normaliser)
    return _token_logprobs(chunk_size, logits, tokens, mask), change


def entropy_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Exact entropy of the softmax over the last axis.

    ``H = -sum_v p_v log p_v`` with ``p = softmax(logits)``. A logit of -inf is an entry of
    probability 0, which adds nothing to the value or the gradient.

    Args:
      logits: unnormalised log-probabilities of every token of the vocabulary.
      mask: true where the entropy is needed. Results are 0 elsewhere (gradient stopped). None
        computes all.
      chunk_size: processes the vocabulary in chunks of this many entries, so that no second array
        of the size of `logits` is allocated. Any positive number; it need not divide the
        vocabulary. The result is the same up to rounding. None processes the vocabulary at once.

    Returns:
      The entropy in nats, between 0 and ``log(vocab)``, with its gradient.

    Raises:
      ValueError: if `chunk_size` is not positive.

    Examples:
      >>> entropy_from_logits(jnp.array([[0.0, 0.0, -jnp.inf], [9.0, -jnp.inf, -jnp.inf]])).tolist()
      [0.6931471824645996, 0.0]
    """
    chunk_size = checked_chunk_size(chunk_size)
    logits, mask = rows_of_logits(logits, mask)
    return _entropy(chunk_size, logits, mask)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _entropy(chunk_size: int | None, logits: Logits, mask: RowMask) -> PerRow:
    return zero_masked(statistics(chunk_size, logits, mask)[1], mask)


@_entropy.defjvp
def _entropy_jvp(chunk_size, primals, tangents):
    logits, mask = primals
    entropy = _entropy(chunk_size, logits, mask)
    normaliser = log_normaliser(chunk_size, logits, mask)

    def slope(logits: Array, normaliser: Normaliser, entropy: Array) -> Array:
        logprobs, possible = normaliser.logprobs(logits)
        return zero_masked(-jnp.exp(logprobs) * (logprobs + entropy[..., None]), possible)

    return entropy, contracted(slope, tangents[0], mask, logits, normaliser, entropy)


def kl_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    ref_logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    direction: KLDirection = "policy||reference",
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Exact KL divergence between two policies at each position, a sum over the vocabulary.

    With ``p = softmax(logits)`` and ``q = softmax(ref_logits)``:

    | direction | value | its gradient by ``logits[v]`` |
    |---|---|---|
    | ``policy||reference`` | ``sum_v p_v log p_v/q_v`` | ``p_v (log p_v/q_v - KL)`` |
    | ``reference||policy`` | ``sum_v q_v log q_v/p_v`` | ``p_v - q_v`` |

    The first is the expectation, over tokens sampled from the policy, of the estimators k1 and k3
    of `kl_estimate`. It is computed as ``sum_v (q_v - p_v + p_v log p_v/q_v)``. No term is
    negative, so neither is the result, and it is accurate near 0.

    Args:
      logits: of the policy, for every token of the vocabulary. -inf is a token of probability 0.
      ref_logits: of the reference; no gradient.
      mask: true where the divergence is needed. Results are 0 elsewhere (gradient stopped). None
        computes all.
      direction: one of the two in the table.
      chunk_size: as in `entropy_from_logits`; None processes the vocabulary at once.

    Returns:
      The divergence in nats, with its gradient; infinite if a token has probability 0 under the
      second policy of `direction` but not under the first.

    Raises:
      ValueError: if `direction` is unknown, or `chunk_size` is not positive.

    References:
      Schulman, "Approximating KL divergence", 2020. http://joschu.net/blog/kl-approx.html

    Examples:
      >>> even, certain = jnp.zeros(2), jnp.array([0.0, -jnp.inf])
      >>> float(kl_from_logits(certain, even).round(4))
      0.6930999755859375
      >>> float(kl_from_logits(certain, even, direction="reference||policy"))
      inf
    """
    settings.choice("direction", direction, KLDirection)
    check_shapes(logits=logits, ref_logits=ref_logits)
    beta = 1.0 if direction == "policy||reference" else 0.0
    return _between(logits, ref_logits, mask, beta, chunk_size)


def jsd_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    teacher_logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    beta: Number = 0.5,
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Exact generalised Jensen-Shannon divergence (JSD) of a policy and its teacher, per position.

    With ``p = softmax(logits)``, ``q = softmax(teacher_logits)`` and the mixture
    ``m = beta q + (1 - beta) p``, in the convention of GKD and TRL:

    | beta | value | its gradient by ``logits[v]`` |
    |---|---|---|
    | 0 | ``KL(q || p)``, the forward KL | ``p_v - q_v`` |
    | between | ``beta KL(q || m) + (1 - beta) K`` | ``(1 - beta) p_v (log p_v/m_v - K)`` |
    | 1 | ``KL(p || q)``, the reverse KL | ``p_v (log p_v/q_v - KL)`` |

    with ``K = KL(p || m)``.

    The forward KL covers all that the teacher writes, the reverse KL seeks its modes. Between them
    the divergence is bounded, by ``log 2`` at 0.5. It vanishes in both limits of `beta`: the two
    KL divergences at 0 and 1 are a convention. No term of the sum is negative, so neither is the
    result; equal logits give exactly 0, in value and gradient.

    Args:
      logits: of the policy, for every token of the vocabulary. -inf is a token of probability 0.
      teacher_logits: of the teacher; no gradient.
      mask: true where the divergence is needed. Results are 0 elsewhere (gradient stopped). None
        computes all.
      beta: weight of the teacher in the mixture, from 0 to 1.
      chunk_size: as in `entropy_from_logits`; None processes the vocabulary at once.

    Returns:
      The divergence in nats, with its gradient. It is infinite only at 0 and 1, as `kl_from_logits`
      is.

    Raises:
      ValueError: if `beta` is outside of 0 to 1, or `chunk_size` is not positive.

    References:
      Agarwal et al., "On-policy distillation of language models: learning from self-generated
      mistakes", 2023, eq. 1. https://arxiv.org/abs/2306.13649

    Examples:
      >>> left, right = jnp.array([0.0, -jnp.inf]), jnp.array([-jnp.inf, 0.0])
      >>> round(float(jsd_from_logits(left, right)), 4)
      0.6931
    """
    rule = "is the teacher's weight in the mixture, from 0 (forward KL) to 1 (reverse KL)."
    beta = settings.static("beta", beta, rule, at_least=0, at_most=1)
    check_shapes(logits=logits, teacher_logits=teacher_logits)
    return _between(logits, teacher_logits, mask, float(beta), chunk_size)


def _between(
    logits: Float[ArrayLike, "*batch vocab"],
    ref_logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None,
    beta: float,
    chunk_size: SupportsIndex | None,
) -> PerRow:
    """`jsd_from_logits` of checked arrays."""
    chunk_size = checked_chunk_size(chunk_size)
    logits, mask = rows_of_logits(logits, mask)
    ref_logits = jax.lax.stop_gradient(jnp.asarray(ref_logits))
    if jnp.float64 in (logits.dtype, ref_logits.dtype):
        logits, ref_logits = as_floats(logits, ref_logits)
    return _divergence(chunk_size, beta, logits, ref_logits, mask)


class _Entries(NamedTuple):
    """Some entries of both distributions, p of the policy and q of the reference.

    Attributes:
      p, q: probabilities.
      p_possible, q_possible: false for a logit of -inf.
      over_p, over_q: ``log p/m`` and ``log q/m`` if p or q is possible, m being q at `beta` 1, p
        at 0, and the mixture between.
    """

    p: Logits
    q: Logits
    p_possible: Array
    q_possible: Array
    over_p: Logits
    over_q: Logits


def _entries(
    beta: float, logits: Logits, ref_logits: Logits, of_policy: Normaliser, of_reference: Normaliser
) -> _Entries:
    logits, ref_logits = as_floats(logits, ref_logits)
    log_p, p_possible = of_policy.logprobs(logits)
    log_q, q_possible = of_reference.logprobs(ref_logits)
    p, q = zero_masked(jnp.exp(log_p), p_possible), zero_masked(jnp.exp(log_q), q_possible)
    over_p, over_q = log_p - log_q, log_q - log_p
    if 0 < beta < 1:
        # By the larger of the two, whose ratio to m is bounded. Equal entries give exactly 0.
        larger = over_p > 0
        share = jnp.where(larger, beta, 1 - beta)
        log_m = jnp.log1p(share * jnp.expm1(jnp.where(larger, over_q, over_p)))
        over_p, over_q = (
            jnp.where(q_possible, jnp.where(larger, 0, over_p) - log_m, -math.log1p(-beta)),
            jnp.where(p_possible, jnp.where(larger, over_q, 0) - log_m, -math.log(beta)),
        )
    return _Entries(p, q, p_possible, q_possible, over_p, over_q)


def _terms(beta: float, entries: _Entries) -> Logits:
    """Terms of the divergence, of which none is negative."""
    p, q, p_possible, q_possible, over_p, over_q = entries
    if beta == 0:
        return _kl_terms(q, p, over_q, q_possible, p_possible)
    if beta == 1:
        return _kl_terms(p, q, over_p, p_possible, q_possible)
    m, either = beta * q + (1 - beta) * p, p_possible | q_possible
    of_teacher = _kl_terms(q, m, over_q, q_possible, either)
    return beta * of_teacher + (1 - beta) * _policy_terms(beta, entries)


def _policy_terms(beta: float, entries: _Entries) -> Logits:
    """Terms of ``KL(p || m)`` of the mixture m."""
    p, q, p_possible, q_possible, over_p, _ = entries
    m = beta * q + (1 - beta) * p
    return _kl_terms(p, m, over_p, p_possible, p_possible | q_possible)


def _kl_terms(
    p: Logits, q: Logits, log_ratio: Logits, p_possible: Array, q_possible: Array
) -> Logits:
    """``q - p + p log(p / q)`` for each entry, of which none is negative."""
    # If p and q are close, q - p cancels; if p is far below q, expm1 overflows.
    close = p * (jnp.expm1(-jnp.maximum(log_ratio, -1)) + log_ratio)
    terms = jnp.where(log_ratio > -1, close, q - p + p * log_ratio)
    terms = jnp.where(p_possible, terms, q)
    return jnp.where((p > 0) & ~q_possible, jnp.inf, terms)


def _summed(
    terms: Callable[[float, _Entries], Logits],
    chunk_size: int | None,
    beta: float,
    logits: Logits,
    ref_logits: Logits,
    mask: RowMask,
) -> PerRow:
    """Sum of the terms. Masked rows have logits of 0 in both, so their divergence is 0."""
    of_policy, of_reference = (log_normaliser(chunk_size, x, mask) for x in (logits, ref_logits))

    def start(begin: Array, counts: Array) -> Array:
        policy, reference = (chunk_of(x, mask, begin, counts.size) for x in (logits, ref_logits))
        of_chunk = terms(beta, _entries(beta, policy, reference, of_policy, of_reference))
        return jnp.sum(jnp.where(along(counts, of_chunk), of_chunk, 0), axis=-1)

    return over_chunks(start, jnp.add, logits.shape[-1], chunk_size)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _divergence(
    chunk_size: int | None, beta: float, logits: Logits, ref_logits: Logits, mask: RowMask
) -> PerRow:
    return _summed(_terms, chunk_size, beta, logits, ref_logits, mask)


@_divergence.defjvp
def _divergence_jvp(chunk_size, beta, primals, tangents):
    logits, ref_logits, mask = primals
    divergence = of_policy = _divergence(chunk_size, beta, logits, ref_logits, mask)
    if 0 < beta < 1:
        of_policy = _summed(_policy_terms, chunk_size, beta, logits, ref_logits, mask)
    normaliser = log_normaliser(chunk_size, logits, mask)
    of_reference = log_normaliser(chunk_size, ref_logits, mask)

    def slope(
        logits: Array,
        ref_logits: Array,
        normaliser: Normaliser,
        of_reference: Normaliser,
        of_policy: Array,
    ) -> Array:
        entries = _entries(beta, logits, ref_logits, normaliser, of_reference)
        if beta == 0:
            return zero_masked(entries.p - entries.q, entries.p_possible)
        weight = 1 if beta == 1 else 1 - beta
        slopes = weight * entries.p * (entries.over_p - of_policy[..., None])
        return zero_masked(slopes, entries.p_possible)

    change = contracted(
        slope, tangents[0], mask, logits, ref_logits, normaliser, of_reference, of_policy
    )
    return divergence, change
