"""Log-probabilities, entropy and KL divergence, computed exactly from logits."""

from functools import partial
from typing import Literal, SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Shaped

from jrl.losses import settings
from jrl.losses.arrays import PerRow, as_floats, check_shapes, zero_masked
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

__all__ = ["KLDirection", "entropy_from_logits", "kl_from_logits", "logprobs_from_logits"]

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
    chunk_size = checked_chunk_size(chunk_size)
    logits, mask = rows_of_logits(logits, mask)
    ref_logits = jax.lax.stop_gradient(jnp.asarray(ref_logits))
    if jnp.float64 in (logits.dtype, ref_logits.dtype):
        logits, ref_logits = as_floats(logits, ref_logits)
    return _divergence(chunk_size, direction, logits, ref_logits, mask)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _divergence(
    chunk_size: int | None,
    direction: KLDirection,
    logits: Logits,
    ref_logits: Logits,
    mask: RowMask,
) -> PerRow:
    first, second = logits, ref_logits
    if direction == "reference||policy":
        first, second = second, first
    of_first = log_normaliser(chunk_size, first, mask)
    of_second = log_normaliser(chunk_size, second, mask)

    def start(begin: Array, counts: Array) -> Array:
        first_piece, second_piece = (chunk_of(x, mask, begin, counts.size) for x in (first, second))
        terms = _terms(first_piece, second_piece, of_first, of_second)
        return jnp.sum(jnp.where(along(counts, terms), terms, 0), axis=-1)

    # Masked rows have logits of 0 in both, so their divergence is 0.
    return over_chunks(start, jnp.add, logits.shape[-1], chunk_size)


def _terms(first: Logits, second: Logits, of_first: Normaliser, of_second: Normaliser) -> Logits:
    """``q - p + p log(p / q)`` for each entry, with p the first distribution and q the second."""
    log_p, p_possible = of_first.logprobs(first)
    log_q, q_possible = of_second.logprobs(second)
    p, q = jnp.exp(log_p), zero_masked(jnp.exp(log_q), q_possible)
    difference = log_p - log_q
    # If p and q are close, q - p cancels; if p is far below q, expm1 overflows.
    close = p * (jnp.expm1(-difference) + difference)
    terms = jnp.where(difference > -1, close, q - p + p * difference)
    terms = jnp.where(p_possible, terms, q)
    impossible = p_possible & ~q_possible & (p > 0)
    return jnp.where(impossible, jnp.inf, terms)


@_divergence.defjvp
def _divergence_jvp(chunk_size, direction, primals, tangents):
    logits, ref_logits, mask = primals
    divergence = _divergence(chunk_size, direction, logits, ref_logits, mask)
    normaliser = log_normaliser(chunk_size, logits, mask)
    of_reference = log_normaliser(chunk_size, ref_logits, mask)

    def slope(
        logits: Array,
        ref_logits: Array,
        normaliser: Normaliser,
        of_reference: Normaliser,
        divergence: Array,
    ) -> Array:
        logits, ref_logits = as_floats(logits, ref_logits)
        log_p, possible = normaliser.logprobs(logits)
        log_q, q_possible = of_reference.logprobs(ref_logits)
        p, q = jnp.exp(log_p), zero_masked(jnp.exp(log_q), q_possible)
        if direction == "reference||policy":
            return zero_masked(p - q, possible)
        return zero_masked(p * (log_p - log_q - divergence[..., None]), possible)

    change = contracted(
        slope, tangents[0], mask, logits, ref_logits, normaliser, of_reference, divergence
    )
    return divergence, change
