"""SAPO: a smooth gate in place of a clip."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.policy.tokens import Loss, RatioLevel, log_ratio_at, prepare, reduce_surrogate
from jrl.losses.reduction import Aggregation, Denominators, Mean


def sapo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    tau_positive: Number = 1.0,
    tau_negative: Number = 1.05,
    level: RatioLevel = "token",
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "seq-mean-token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Loss of SAPO, whose gate closes gradually as the ratio leaves one.

    With ``r = exp(logprobs - old_logprobs)``, of the token or of its row, and
    ``p = sigmoid(tau (r - 1))``,

        l = -A (4 / tau) p          tau = tau_positive where A > 0, tau_negative where A <= 0

    Its gradient is that of ``-A r`` times ``4 p (1 - p)``, which is 1 at r = 1, so the first
    on-policy step is REINFORCE; far from 1 it fades instead of stopping. The loss *value* at r = 1
    is ``-2 A / tau``, not ``-A``: only the gradient compares with other losses. The larger
    temperature makes the gate close earlier for negative advantages.

    verl takes `seq-mean-token-mean` whatever is configured; TRL takes the same and counts empty
    rows (``empty_rows="count"``).

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      tau_positive: temperature where the advantage is positive; positive.
      tau_negative: temperature where the advantage is negative or 0; positive.
      level: over what the ratio is taken: "token", or "sequence" for the geometric mean of a row's
        ratios, as in `gspo_loss`; a row must then be one whole response. (TRL:
        ``importance_sampling_level``.)
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, where the gradient is then 0; None is off. verl clamps at 20, TRL does not.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``gate``: ``4 p (1 - p)``, the share of the gradient that the gate lets through;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`, or, at the
        level of sequences, as in `gspo_loss`.

    Raises:
      ValueError: if a temperature is not positive, `level` or the aggregation is unknown,
        denominators stand beside ``aggregation=None``, or shapes do not agree.

    References:
      Gao et al., "Soft adaptive policy optimization", 2025. https://arxiv.org/abs/2511.20347

    Examples:
      >>> import jax.numpy as jnp
      >>> ratio, ones = jnp.array([0.0, 1.0, 3.0]), jnp.ones(3)
      >>> losses, _ = sapo_loss(jnp.log(ratio), 0 * ones, ones, ones, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses]
      [-1.0758, -2.0, -3.5232]
      >>> ones = jnp.ones((1, 3))
      >>> loss, metrics = sapo_loss(-ones, -ones, ones, ones)
      >>> float(loss), float(metrics["gate"].value())
      (-2.0, 1.0)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    positive, negative = (
        settings.number(name, tau, "is a temperature and must be positive, such as 1.0.", above=0)
        for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative))
    )
    log_ratio, statistics = log_ratio_at(level, tokens, max_log_ratio)
    tau = jnp.where(tokens.advantages > 0, positive, negative).astype(log_ratio.dtype)
    # What tau (r - 1) is near r = 1 is a small difference, which expm1 keeps exact.
    gate = jax.nn.sigmoid(tau * jnp.expm1(log_ratio))
    surrogate = -tokens.advantages * (4 / tau) * gate
    statistics = {"gate": 4 * gate * (1 - gate), **statistics}
    return reduce_surrogate(
        sapo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
