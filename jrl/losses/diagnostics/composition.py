"""Composition of a batch: response lengths, negative advantages, and outcomes within groups."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Shaped

from jrl.losses.arrays import as_mask, masked_constants, num_true, ratio_or_zero, row_mean
from jrl.losses.diagnostics import tokens
from jrl.losses.groups import check_groups, group_max, group_min, group_sum

__all__ = [  # noqa: RUF022 - in reading order
    "length_share",
    "LengthShare",
    "negative_share",
    "NegativeShare",
    "group_degeneracy",
    "GroupDegeneracy",
]


class LengthShare(NamedTuple):
    """Shares of the batch per bucket of response length.

    Attributes:
      responses: share of the responses, the weight of the bucket in a loss that averages over
        responses ("seq-mean-token-mean").
      tokens: share of the tokens, its weight in a loss that averages over tokens ("token-mean").
    """

    responses: Float[Array, "buckets"]
    tokens: Float[Array, "buckets"]


class NegativeShare(NamedTuple):
    """Responses with a negative mean advantage, compared with the rest.

    Attributes:
      responses: their share of the responses.
      tokens: their share of the tokens.
      length: their mean length in tokens, 0 if there are none.
      other_length: mean length of the responses with a positive mean advantage.
      drift: mean advantage over all tokens. 0 after whitening over tokens; under "token-mean" any
        other drift raises or lowers the probability of all tokens of the batch.
    """

    responses: Float[Array, ""]
    tokens: Float[Array, ""]
    length: Float[Array, ""]
    other_length: Float[Array, ""]
    drift: Float[Array, ""]


def length_share(mask: Shaped[ArrayLike, "*batch time"], *, edges: Sequence[int]) -> LengthShare:
    """Share of short and long responses in the weight of the gradient.

    **Concern**: the effect of a loss averaged over tokens (arXiv 2505.17997).

    **Reading it.** Under "token-mean" a response has a weight proportional to its length: one of
    100 and one of 2000 tokens have 4.8 % and 95.2 %. If the longest buckets have most of the tokens
    and few of the responses, long responses dominate the update, and a tendency of theirs
    (repetition, say) is learned first.

    Args:
      mask: true on sampled tokens.
      edges: increasing lengths that separate the buckets: up to the first, above it up to the
        second, ..., above the last.

    Returns:
      A `LengthShare`, one entry more than `edges`.

    Raises:
      ValueError: if the edges do not increase.

    References:
      Yu et al., "DAPO", 2025, section 3.3 (the loss over tokens). https://arxiv.org/abs/2503.14476

    Examples:
      >>> mask = jnp.arange(2000)[None, :] < jnp.array([[100], [2000]])
      >>> length_share(mask, edges=(1000,)).tokens.round(3).tolist()
      [0.04800000041723251, 0.9520000219345093]
    """
    mask, dtype = as_mask(mask), jnp.result_type(float)
    length = num_true(mask, -1)
    bins, rows, num_buckets = tokens.buckets(length, edges), length > 0, len(edges) + 1
    counts = tokens.counts(bins, rows, num_buckets).astype(dtype)
    sizes = tokens.per_bin(length.astype(dtype), bins, rows, num_buckets)
    return LengthShare(
        responses=ratio_or_zero(counts, num_true(rows)), tokens=ratio_or_zero(sizes, num_true(mask))
    )


def negative_share(
    advantages: Float[ArrayLike, "*batch time"], mask: Shaped[ArrayLike, "*batch time"]
) -> NegativeShare:
    """Share and length of the responses with a negative mean advantage.

    **Concern**: the effect of a loss averaged over tokens (arXiv 2505.17997).

    **Reading it.** Failed responses tend to be long. If their share of the tokens is far above
    their share of the responses, a token-mean loss mostly lowers the probability of what was
    sampled. That raises entropy or collapses lengths, depending on which tokens are penalised.

    Args:
      advantages: advantages of the policy loss.
      mask: true on sampled tokens.

    Returns:
      A `NegativeShare`.

    Examples:
      >>> mask = jnp.array([[1, 0, 0], [1, 1, 1]])
      >>> found = negative_share(jnp.array([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]), mask)
      >>> [float(x) for x in found]
      [0.5, 0.75, 3.0, 1.0, -0.5]
    """
    mask, (advantages,) = masked_constants(mask, advantages=advantages)
    means, length = row_mean(advantages, mask)[..., 0], num_true(mask, -1)
    rows, length = length > 0, length.astype(advantages.dtype)
    negative, positive = rows & (means < 0), rows & (means > 0)
    negative_tokens = jnp.broadcast_to(negative[..., None], mask.shape)
    return NegativeShare(
        responses=tokens.mean(negative.astype(length.dtype), rows),
        tokens=tokens.mean(negative_tokens.astype(length.dtype), mask),
        length=tokens.mean(length, negative),
        other_length=tokens.mean(length, positive),
        drift=tokens.mean(advantages, mask),
    )


class GroupDegeneracy(NamedTuple):
    """Shares of the groups, each of equal weight, whatever its size.

    Attributes:
      all_right: groups in which every response is correct.
      all_wrong: groups in which no response is.
      pass_at_1: probability that one response is correct.
      pass_at_k: groups in which at least one is correct, k being the size of each group.
      gap: ``pass_at_k - pass_at_1``.
    """

    all_right: Float[Array, ""]
    all_wrong: Float[Array, ""]
    pass_at_1: Float[Array, ""]
    pass_at_k: Float[Array, ""]
    gap: Float[Array, ""]


def group_degeneracy(
    correct: Shaped[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> GroupDegeneracy:
    """Share of prompts whose responses are all right or all wrong, pass@1 and pass@k.

    **Concern**: exploration (arXiv 2505.17997).

    **Reading it.** Groups all right or all wrong have no group-relative advantage; together they
    are the share of sampling that GRPO wastes and dynamic sampling filters. A growing share of all
    right is success; a share of all wrong that does not shrink is what exploration does not reach.
    The gap closes as pass@1 rises. If pass@k rises too, the policy learns; if it does not, the
    policy only sharpens: it samples more often what it could solve before.

    Args:
      correct: correctness of each response, bool or 0/1; not the shaped reward.
      groups: one integer per response, equal for responses to the same prompt.

    Returns:
      A `GroupDegeneracy`.

    References:
      Yu et al., "DAPO", 2025, section 3.2. https://arxiv.org/abs/2503.14476

    Examples:
      >>> correct, groups = jnp.array([1, 1, 0, 1, 0, 0]), jnp.array([4, 4, 7, 7, 9, 9])
      >>> found = group_degeneracy(correct, groups)
      >>> round(float(found.pass_at_1), 3), round(float(found.pass_at_k), 3)
      (0.5, 0.667)
    """
    correct, index = check_groups(groups, correct=correct)
    # Each response is weighted by 1 / group size, so that sums over rows count groups.
    part = 1 / group_sum(jnp.ones_like(correct), index)
    part = part / jnp.sum(part)
    best, worst = group_max(correct, index), group_min(correct, index)
    pass_at_1, pass_at_k = jnp.sum(part * correct), jnp.sum(part * best)
    return GroupDegeneracy(
        all_right=jnp.sum(part * worst),
        all_wrong=jnp.sum(part * (1 - best)),
        pass_at_1=pass_at_1,
        pass_at_k=pass_at_k,
        gap=pass_at_k - pass_at_1,
    )
