"""Selection of the tokens and sequences that a loss is computed on: masks to pass to it."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_floats,
    as_mask,
    check_shapes,
    masked_constants,
    num_true,
    row_lengths,
)
from jrl.losses.policy.tokens import ascending, floor_fraction, kth, prepare

__all__ = ["top_entropy_mask", "entropy_threshold", "off_policy_sequence_mask"]  # noqa: RUF022


def entropy_threshold(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    fraction: Number = 0.2,
) -> Float[Array, ""]:
    """The entropy that a given share of a batch's tokens reaches, for `top_entropy_mask`.

    Of N true tokens the ``floor(fraction (N - 1)) + 1`` highest reach it: those that are not below
    the (1 - fraction) quantile, as in TRL.

    Args:
      entropy: of the policy at each token, in nats; no gradient. The **whole batch**.
      mask: true on sampled tokens.
      fraction: the share, above 0 and up to 1.

    Returns:
      The least entropy among them; 0 if no token is true, and NaN if one of the entropies is, at
      which `top_entropy_mask` keeps every token.

    Raises:
      ValueError: if `fraction` is not in (0, 1].

    References:
      As for `top_entropy_mask`.

    Examples:
      >>> float(entropy_threshold(jnp.array([0.5, 3.0, 1.0, 0.25, 2.0, 0.75]), jnp.ones(6)))
      2.0
    """
    rule = "is a share of the tokens, above 0 and up to 1."
    fraction = settings.static("fraction", fraction, rule, above=0, at_most=1)
    mask, (entropy,) = masked_constants(mask, entropy=entropy)
    last = num_true(mask) - 1
    rank, _, _ = floor_fraction(fraction, jnp.maximum(last, 0))
    threshold = kth(ascending(entropy, mask), last - rank)
    # Sorting puts what is not a number last, where it would be overlooked.
    unknown = jnp.any(jnp.isnan(entropy))
    return jnp.where(unknown, jnp.asarray(jnp.nan, threshold.dtype), threshold)


def top_entropy_mask(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    fraction: Number = 0.2,
    threshold: Scalar | None = None,
) -> Bool[Array, "*batch time"]:
    """The mask of the tokens at which the policy is most undecided, the "80/20 rule".

    Kept is a token whose entropy is at least the threshold, so that of N true tokens
    ``floor(fraction (N - 1)) + 1`` are kept, and with them all that are equal to the least of them.
    A loss that counts its own tokens then averages over those that are kept, as in the paper.

    Args:
      entropy: of the policy at each token, in nats; no gradient.
      mask: true on sampled tokens.
      fraction: the share of the tokens that is kept, above 0 and up to 1, which keeps all; 0.2 in
        the paper. Without effect where `threshold` is given.
      threshold: of `entropy_threshold`, for batches that are cut. None takes it from the arrays
        given here, which must then be the **whole batch**.

    Returns:
      A boolean mask, false wherever `mask` is.

    Raises:
      ValueError: if `fraction` is not in (0, 1].

    References:
      Wang et al., "Beyond the 80/20 rule: high-entropy minority tokens drive effective
      reinforcement learning for LLM reasoning", 2025. https://arxiv.org/abs/2506.01939

    Examples:
      >>> top_entropy_mask(jnp.array([0.5, 3.0, 1.0, 0.25, 2.0, 0.75]), jnp.ones(6)).tolist()
      [False, True, False, False, True, False]
    """
    if threshold is None:
        threshold = entropy_threshold(entropy, mask, fraction=fraction)
    settings.check_scalar("threshold", threshold)
    check_shapes(entropy=entropy, mask=mask)
    mask = as_mask(mask)
    (entropy,) = as_floats(entropy)
    # What is known to be below goes, so that an entropy which is no number is not masked away.
    return mask & ~(entropy < jnp.asarray(threshold).astype(entropy.dtype))


def off_policy_sequence_mask(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    max_divergence: Number,
) -> Bool[Array, "*batch time"]:
    """The mask without the bad sequences that the policy has already left, as in DeepSeek-V3.2.

        a sequence goes if A < 0 and mean_t(behaviour_logprobs - logprobs) > max_divergence

    Its own mistakes teach a policy most; those of another one, which it would hardly make any more,
    only disturb. Sequences of positive or zero advantage always stay.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      behaviour_logprobs: the same under the policy that sampled them; no gradient.
      advantages: ``[batch, 1]`` for one per row, or one per token, of which then only the negative
        ones go; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      max_divergence: the greatest mean difference that is kept, in nats per token. TRL suggests
        0.5.

    Returns:
      A boolean mask, false wherever `mask` is.

    References:
      DeepSeek-AI, "DeepSeek-V3.2", 2025, off-policy sequence masking.
      https://arxiv.org/abs/2512.02556

    Examples:
      >>> logprobs, ones = jnp.array([[-1.0, -3.0], [-1.0, -3.0]]), jnp.ones((2, 2))
      >>> advantages = jnp.array([[1.0], [-1.0]])
      >>> off_policy_sequence_mask(logprobs, -ones, advantages, ones, max_divergence=0.5).tolist()
      [[True, True], [False, False]]
    """
    tokens = prepare(logprobs, behaviour_logprobs, advantages, mask)
    max_divergence = settings.number("max_divergence", max_divergence)
    total = jnp.sum(tokens.old_logprobs - tokens.logprobs, axis=-1, keepdims=True)
    far = total > max_divergence * row_lengths(tokens.mask, total)
    return tokens.mask & ~((tokens.advantages < 0) & far)
