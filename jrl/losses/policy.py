"""Policy losses: a surrogate for each token, then one reduction.

Arguments come *current policy first, then old*; verl and its descendants have it the other way
round. Only the current log-probabilities carry a gradient.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Real, Shaped

from jrl.losses.arrays import Number, Scalar, as_floats, as_mask, check_shapes, keep, spread
from jrl.losses.reduction import Aggregation, Mean, aggregate


def ppo_surrogate(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    clip_dual: Number | None = None,
    max_log_ratio: Number | None = 20.0,
) -> Float[Array, "*batch time"]:
    """Per-token clipped policy loss of PPO, to be minimised.

    With ``r = exp(logprobs - old_logprobs)``,

        l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        l = min(l, -A clip_dual)                                   where A < 0, if clip_dual is set

    Equal bounds give PPO and GRPO; a larger `clip_high` gives the "clip-higher" of DAPO, which
    leaves rare tokens room to grow. The gradient of a token is that of ``-A r`` unless a bound is
    *strictly* exceeded, and then 0; in particular it is that of REINFORCE where the two policies
    are equal, even with a bound of 0.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: how far the ratio may fall below one before a negative advantage stops acting.
      clip_high: how far it may rise above one before a positive advantage stops acting.
      clip_dual: the ratio, greater than one, beyond which a negative advantage stops acting as
        well; None is off. Published settings are 3 and 10.
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, where the gradient is then 0; ``exp(20)`` is 5e8. Probabilities that vanish
        under one policy (a ratio of 0 or infinity) thereby give finite losses. None is off, and
        such ratios then give what IEEE arithmetic gives.

    Returns:
      One loss per token, 0 where the mask is false. Reduce it with `aggregate`.

    Raises:
      ValueError: if a bound is negative or `clip_dual` is not above one.

    References:
      Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 7.
      https://arxiv.org/abs/1707.06347
      Ye et al., "Mastering complex control in MOBA games", 2019, eq. 4 (dual clip).
      https://arxiv.org/abs/1912.09729
      Yu et al., "DAPO", 2025, section 3.1 (clip-higher). https://arxiv.org/abs/2503.14476

    >>> import jax.numpy as jnp
    >>> ratio, ones = jnp.array([0.5, 1.0, 1.25, 4.0]), jnp.ones(4)
    >>> ppo_surrogate(jnp.log(ratio), 0 * ones, ones, ones, clip_high=0.25).tolist()
    [-0.5, -1.0, -1.25, -1.25]
    """
    surrogate, _ = _clipped(
        logprobs, old_logprobs, advantages, mask, clip_low, clip_high, clip_dual, max_log_ratio
    )
    return surrogate


def ppo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    clip_dual: Number | None = None,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation = "token-mean",
    num_tokens: Scalar | None = None,
    num_sequences: Scalar | None = None,
    max_length: Number | None = None,
    sequence_lengths: Real[ArrayLike, "*batch time"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Clipped policy loss of PPO: `ppo_surrogate`, weighted if asked, then `aggregate`.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: see `ppo_surrogate`, as are `clip_high`, `clip_dual` and `max_log_ratio`.
      clip_high: 0.2 in PPO and GRPO, 0.28 in DAPO and VAPO.
      clip_dual: None is off.
      max_log_ratio: None is off.
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`, such as
        corrections for a sampler that differs from the old policy; no gradient. None is off.
      aggregation: see `aggregate`, as are the arguments after it.
      num_tokens: tokens of the whole batch.
      num_sequences: sequences of the whole batch.
      max_length: constant of `seq-mean-token-sum-norm`.
      sequence_lengths: for rows that are not sequences.

    Returns:
      `(loss, metrics)`. The metrics are means over the true tokens, whatever the aggregation, kept
      as `Mean` so that they add up over micro-batches and devices:

      * ``pg_clipfrac``: where a clip binds, that is, changes the loss;
      * ``pg_clipfrac_lower``: where the dual clip does;
      * ``ppo_kl``: ``old_logprobs - logprobs``, the k1 estimate of KL(old || current);
      * ``ratio``, ``ratio_squared``: of the two policies; 1 each while they are equal. The
        effective share of the sample is ``ratio^2 / ratio_squared``;
      * ``ratio_clamped``: where `max_log_ratio` was exceeded.

    Raises:
      ValueError: if a bound or the aggregation is not valid, or shapes do not agree.

    References:
      As for `ppo_surrogate`.

    >>> import jax, jax.numpy as jnp
    >>> old = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.25]]))
    >>> mask = jnp.array([[1, 1], [1, 0]])
    >>> advantages = jnp.array([[1.0], [-1.0]])
    >>> step = jax.value_and_grad(ppo_loss, has_aux=True)
    >>> (loss, metrics), gradient = step(old, old, advantages, mask)
    >>> gradient.round(3).tolist(), float(metrics["pg_clipfrac"].value())
    ([[-0.3330000042915344, -0.3330000042915344], [0.3330000042915344, 0.0]], 0.0)
    """
    surrogate, statistics = _clipped(
        logprobs, old_logprobs, advantages, mask, clip_low, clip_high, clip_dual, max_log_ratio
    )
    if importance_weights is not None:
        weights = spread("importance_weights", importance_weights, surrogate)
        surrogate = surrogate * jax.lax.stop_gradient(weights)
    loss = aggregate(
        surrogate,
        mask,
        aggregation,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_length=max_length,
        sequence_lengths=sequence_lengths,
    )
    return loss, {name: Mean.of(statistic, mask) for name, statistic in statistics.items()}


def _clipped(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    clip_low: Number,
    clip_high: Number,
    clip_dual: Number | None,
    max_log_ratio: Number | None,
) -> tuple[
    Float[Array, "*batch time"],
    dict[str, Float[Array, "*batch time"]],
]:
    """The surrogate of `ppo_surrogate`, and the statistics of `ppo_loss` for each token."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(
            f"clip_low={clip_low} and clip_high={clip_high} are distances from one and cannot be "
            "negative; float('inf') is off."
        )
    if clip_dual is not None and clip_dual <= 1:
        raise ValueError(f"clip_dual={clip_dual} must be above 1, such as 3; None is off.")
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    mask = as_mask(mask)
    logprobs, old_logprobs, advantages = as_floats(logprobs, old_logprobs, advantages)
    advantages = spread("advantages", advantages, logprobs)
    logprobs = keep(logprobs, mask)
    old_logprobs = keep(jax.lax.stop_gradient(old_logprobs), mask)
    advantages = keep(jax.lax.stop_gradient(advantages), mask)

    log_ratio = logprobs - old_logprobs
    clamped = jnp.zeros_like(mask)
    if max_log_ratio is not None:
        clamped = jnp.abs(log_ratio) > max_log_ratio
        log_ratio = jnp.clip(log_ratio, -max_log_ratio, max_log_ratio)
    ratio = jnp.exp(log_ratio)

    # Selected by comparison rather than by jnp.maximum, which halves the gradient of a tie.
    unclipped = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    binds = bounded > unclipped
    surrogate = jnp.where(binds, bounded, unclipped)
    binds_dual = jnp.zeros_like(mask)
    if clip_dual is not None:
        ceiling = -advantages * clip_dual
        binds_dual = (advantages < 0) & (surrogate > ceiling)
        surrogate = jnp.where(binds_dual, ceiling, surrogate)
    statistics = {
        "pg_clipfrac": binds,
        "pg_clipfrac_lower": binds_dual,
        "ppo_kl": -log_ratio,
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "ratio_clamped": clamped,
    }
    return surrogate, {name: x.astype(ratio.dtype) for name, x in statistics.items()}


def positive_example_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    correct: Shaped[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    num_tokens: Scalar | None = None,
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Negative log-likelihood of the correct responses, VAPO's imitation of its own successes.

    ``-sum_{i in T} sum_t logprobs_it / sum_{i in T} n_i`` with T the correct responses: a mean over
    *their* tokens, not over sequences and not over the tokens of the batch. VAPO adds it to the
    policy loss with a factor of 0.1.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      correct: true for the responses to imitate, one per row.
      mask: true on sampled tokens.
      num_tokens: sampled tokens of *correct* responses in the whole batch; counted here if None.

    Returns:
      `(loss, metrics)`; the loss is 0, and its gradient too, if no response is correct. The metric
      ``positive_nll`` is the same mean as a `Mean`.

    References:
      Yue et al., "VAPO", 2025, section 4.3. https://arxiv.org/abs/2504.05118

    >>> import jax.numpy as jnp
    >>> logprobs = jnp.array([[-1.0, -2.0], [-3.0, -4.0]])
    >>> loss, _ = positive_example_loss(logprobs, jnp.array([1, 0]), jnp.ones((2, 2)))
    >>> float(loss)
    1.5
    """
    check_shapes(logprobs=logprobs, mask=mask)
    imitated = as_mask(mask) & as_mask(correct)[..., None]
    (logprobs,) = as_floats(logprobs)
    loss = aggregate(-logprobs, imitated, "token-mean", num_tokens=num_tokens)
    return loss, {"positive_nll": Mean.of(-logprobs, imitated)}
