"""Length bias of a loss averaged over tokens: share of each length, and of bad responses."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import check_shapes
from jrl.losses.diagnostics import tokens


class LengthShare(NamedTuple):
    """Per bucket of response length, its share of the batch.

    Attributes:
      responses: share of the responses, which is the bucket's weight in a loss that averages over
        responses ("seq-mean-token-mean").
      tokens: share of the tokens, which is its weight in one that averages over tokens
        ("token-mean").
    """

    responses: Float[Array, "buckets"]
    tokens: Float[Array, "buckets"]


class NegativeShare(NamedTuple):
    """Responses with a negative mean advantage against the others.

    Attributes:
      responses: their share of the responses.
      tokens: their share of the tokens.
      length: their mean length in tokens, 0 where there are none.
      other_length: that of the responses with a positive mean advantage.
      drift: mean advantage over all tokens. 0 after whitening over tokens; under "token-mean" a
        batch with another drift pushes all its tokens up or down.
    """

    responses: Float[Array, ""]
    tokens: Float[Array, ""]
    length: Float[Array, ""]
    other_length: Float[Array, ""]
    drift: Float[Array, ""]


def length_share(mask: Shaped[ArrayLike, "*batch time"], *, edges: Sequence[int]) -> LengthShare:
    """How much of the gradient's weight short and long responses have.

    **Concern**: the effect of a loss averaged over tokens (2505.17997).

    **Reading it.** Under "token-mean" a response weighs as much as it is long: one of 100 and one
    of 2000 tokens have 4.8 % and 95.2 %. If the buckets at the long end hold most of the tokens and
    few of the responses, what the policy learns is what long responses teach, and a tendency there
    (repetition, say) is learned first.

    Args:
      mask: true on sampled tokens.
      edges: increasing lengths that separate the buckets: up to the first, above it up to the
        second, ..., above the last.

    Returns:
      A `LengthShare`, one entry more than edges.

    Raises:
      ValueError: if the edges do not increase.

    References:
      Yu et al., "DAPO", 2025, section 3.3 (the loss over tokens). https://arxiv.org/abs/2503.14476

    Examples:
      >>> import jax.numpy as jnp
      >>> mask = jnp.arange(2000)[None, :] < jnp.array([[100], [2000]])
      >>> length_share(mask, edges=(1000,)).tokens.round(3).tolist()
      [0.04800000041723251, 0.9520000219345093]
    """
    mask, (one,) = tokens.hidden(mask, jnp.ones(jnp.shape(mask)))
    length = tokens.count(mask, -1)
    bins, rows, number = tokens.buckets(length, edges), length > 0, len(edges) + 1
    sizes = tokens.per_bin(length.astype(one.dtype), bins, rows, number)
    return LengthShare(
        responses=tokens.ratio(
            tokens.counts(bins, rows, number).astype(one.dtype), tokens.count(rows)
        ),
        tokens=tokens.ratio(sizes, tokens.count(mask)),
    )


def negative_share(
    advantages: Float[ArrayLike, "*batch time"], mask: Shaped[ArrayLike, "*batch time"]
) -> NegativeShare:
    """Whether bad responses are longer than good ones and outweigh them.

    **Concern**: the effect of a loss averaged over tokens (2505.17997).

    **Reading it.** Failed responses tend to be long. If their share of the tokens is far above
    their share of the responses, a token-mean loss is mostly about what not to do; that drives
    entropy up or collapses lengths, depending on where the penalty falls.

    Args:
      advantages: that the policy learns from.
      mask: true on sampled tokens.

    Returns:
      A `NegativeShare`.

    Raises:
      ValueError: if shapes do not agree.

    References:
      Shao and Cheng, 2025. https://arxiv.org/abs/2505.17997

    Examples:
      >>> import jax.numpy as jnp
      >>> mask = jnp.array([[1, 0, 0], [1, 1, 1]])
      >>> found = negative_share(jnp.array([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]), mask)
      >>> [float(x) for x in found]
      [0.5, 0.75, 3.0, 1.0, -0.5]
    """
    check_shapes(advantages=advantages, mask=mask)
    mask, (advantages,) = tokens.hidden(mask, advantages)
    means, length = tokens.row_mean(advantages, mask), tokens.count(mask, -1)
    rows, length = length > 0, length.astype(advantages.dtype)
    negative, positive = rows & (means < 0), rows & (means > 0)
    return NegativeShare(
        responses=tokens.mean(negative.astype(length.dtype), rows),
        tokens=tokens.mean(
            jnp.broadcast_to(negative[..., None], mask.shape).astype(length.dtype), mask
        ),
        length=tokens.mean(length, negative),
        other_length=tokens.mean(length, positive),
        drift=tokens.mean(advantages, mask),
    )
