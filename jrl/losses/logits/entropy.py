"""Entropy of logits."""

from functools import partial
from typing import SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses.arrays import zero_masked
from jrl.losses.logits.vocabulary import (
    Normaliser,
    checked_chunk_size,
    contracted,
    log_normaliser,
    rows_of_logits,
    statistics,
)


def entropy_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Exact entropy of the distributions whose logits lie along the last axis.

    ``H = -sum_v p_v log p_v`` with ``p = softmax(logits)``. A logit of -inf is an entry of
    probability 0, which adds nothing to the value or the gradient.

    Args:
      logits: unnormalised log-probabilities of every token of the vocabulary.
      mask: true where the entropy is wanted. If given, it is 0 elsewhere, and what lies there
        reaches no gradient; None computes it everywhere.
      chunk_size: go through the vocabulary this many entries at a time, so that no second array of
        the size of `logits` is made; any positive number, whether or not it divides the vocabulary.
        The result is the same up to rounding. None takes all of it at once.

    Returns:
      The entropy in nats, between 0 and ``log(vocab)``, with its gradient.

    Raises:
      ValueError: if `chunk_size` is not positive, or shapes do not agree.

    Examples:
      >>> import jax.numpy as jnp
      >>> entropy_from_logits(jnp.array([[0.0, 0.0, -jnp.inf], [9.0, -jnp.inf, -jnp.inf]])).tolist()
      [0.6931471824645996, 0.0]
    """
    chunk_size = checked_chunk_size(chunk_size)
    logits, mask = rows_of_logits(logits, mask)
    return _entropy(chunk_size, logits, mask)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _entropy(
    chunk_size: int | None, logits: Float[Array, "*batch vocab"], mask: Bool[Array, "*batch"]
) -> Float[Array, "*batch"]:
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
