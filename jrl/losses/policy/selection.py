"""Loss masks: selection of tokens by entropy and of sequences by divergence from the sampler."""

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
    """Entropy threshold of the top fraction of a batch's tokens, for `top_entropy_mask`.

    Of N tokens in the mask, the ``floor(fraction (N - 1)) + 1`` highest reach it: those not below
    the (1 - fraction) quantile, as in TRL.

    Args:
      entropy: of the policy at each token, in nats; no gradient. The **whole batch**.
      mask: true on sampled tokens.
      fraction: fraction of the tokens, above 0 and up to 1.

    Returns:
      The least entropy among them; 0 if no token is in the mask, and NaN if one of the entropies
      is, for which `top_entropy_mask` keeps every token.

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
    # Sorting puts NaN last: it would not affect the threshold.
    unknown = jnp.any(jnp.isnan(entropy))
    return jnp.where(unknown, jnp.sum(entropy), threshold)


def top_entropy_mask(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    fraction: Number = 0.2,
    threshold: Scalar | None = None,
) -> Bool[Array, "*batch time"]:
    """Mask of the tokens with the highest entropy (the "80/20 rule").

    A token is kept if its entropy is at least the threshold: of N tokens in the mask,
    ``floor(fraction (N - 1)) + 1``, and all that are equal to the least of them. A loss that takes
    its token count from this mask averages over the kept tokens, as in the paper.

    Args:
      entropy: of the policy at each token, in nats; no gradient.
      mask: true on sampled tokens.
      fraction: fraction of the tokens to keep, above 0 and up to 1 (all); 0.2 in the paper. Ignored
        if `threshold` is given.
      threshold: from `entropy_threshold`, for batches split into micro-batches. None computes it
        from these arrays, which must then be the **whole batch**.

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
    # Drops what is below, rather than keeping what is not, so that a NaN entropy is not masked.
    return mask & ~(entropy < jnp.asarray(threshold).astype(entropy.dtype))


def off_policy_sequence_mask(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    max_divergence: Number,
) -> Bool[Array, "*batch time"]:
    """Off-policy sequence mask of DeepSeek-V3.2: drops bad sequences that have become unlikely.

        dropped if A < 0 and mean_t(behaviour_logprobs - logprobs) > max_divergence

    A policy learns most from mistakes that it still makes; mistakes of an older policy, which it
    would rarely sample any more, disturb training. Sequences of positive or zero advantage are
    always kept.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      behaviour_logprobs: the same under the policy that sampled them; no gradient.
      advantages: ``[batch, 1]`` for one per row; no gradient. With one per token, only the tokens
        with a negative advantage are dropped.
      mask: true on sampled tokens. A row is one sequence.
      max_divergence: the largest mean difference that is kept, in nats per token. TRL suggests 0.5.

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
