"""Log-probabilities of given tokens from logits."""

from functools import partial
from typing import SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Integer, Shaped

from jrl.losses.arrays import as_floats, check_shapes, zero_masked
from jrl.losses.logits.vocabulary import (
    Normaliser,
    along,
    checked_chunk_size,
    contracted,
    log_normaliser,
    rows_of_logits,
)


def logprobs_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    tokens: Integer[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Log-probabilities of given tokens, from the logits of the positions that predict them.

    ``z_token - log sum_v exp(z_v)``. Nothing is shifted: ``logits[b, t]`` must be what the model
    says before it sees ``tokens[b, t]``.

    Args:
      logits: unnormalised log-probabilities of every token of the vocabulary. -inf is an impossible
        token, which gets no gradient.
      tokens: the tokens asked about, in ``0..vocab - 1``.
      mask: true where the result is wanted. If given, it is 0 elsewhere, whatever `tokens` holds,
        and what lies there reaches no gradient; None computes it everywhere.
      chunk_size: go through the vocabulary this many entries at a time, so that in half precision
        only a chunk is ever raised to float32. The result is the same up to rounding. None takes
        all of it at once.

    Returns:
      Log-probabilities in nats, with their gradients; -inf for an impossible token.

    Raises:
      ValueError: if `chunk_size` is not positive, or shapes do not agree.

    Examples:
      >>> import jax.numpy as jnp
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
    chunk_size: int | None,
    logits: Float[Array, "*batch vocab"],
    tokens: Integer[Array, "*batch"],
    mask: Bool[Array, "*batch"],
) -> Float[Array, "*batch"]:
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
