"""LUSPO: GSPO without its preference for short responses."""

from typing import Unpack

from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Number
from jrl.losses.policy.sequence_ratio.gspo import sequence_clipped
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    SequenceGradient,
    lengths,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean


def luspo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Bound = 2e-3,
    clip_high: Bound = 2.5e-3,
    clip_dual: Number | None = None,
    gradient: SequenceGradient = "token",
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "seq-mean-token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Loss of LUSPO: that of `gspo_loss` for each token, times the length of the response.

    ``l_it = n_i max(-A s_it, -A clip(s_it, 1 - clip_low, 1 + clip_high))`` with ``n_i`` the true
    tokens of row i. GSPO's mean within a response divides its gradient by the length, which makes
    long responses count less per token; the factor takes that back.

    With the default aggregation it equals `gspo_loss` with ``aggregation="seq-mean-token-sum"`` and
    the bounds of this function. TRL divides by all rows (``empty_rows="count"``).

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A row is one whole
        response.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: see `gspo_loss`, as are the settings up to `max_log_ratio`; the defaults are
        those that TRL recommends.
      clip_high: 2.5e-3 there.
      clip_dual: None is off.
      gradient: "token" or "sequence".
      max_log_ratio: None is off.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `gspo_loss`.

    Raises:
      ValueError: as `gspo_loss`.

    References:
      Liu et al., "Length-unbiased sequence policy optimization", 2026.
      https://arxiv.org/abs/2602.05261

    Examples:
      >>> import jax.numpy as jnp
      >>> zeros, mask = jnp.zeros((2, 3)), jnp.array([[1, 1, 1], [1, 1, 0]])
      >>> arrays = zeros, zeros, jnp.array([[1.0], [-0.5]]), mask
      >>> losses, _ = luspo_loss(*arrays, aggregation=None)
      >>> losses[:, 0].tolist(), float(luspo_loss(*arrays)[0])
      ([-3.0, 1.0], -1.0)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    surrogate, statistics = sequence_clipped(
        tokens, clip_low, clip_high, clip_dual, gradient, max_log_ratio
    )
    surrogate = surrogate * lengths(tokens)
    return reduce_surrogate(
        luspo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
