"""Advantages of responses that were cut by a window before they ended, as in T-PPO."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Real, Shaped

from jrl.losses import settings
from jrl.losses.advantages.critic.gae import gae
from jrl.losses.advantages.critic.lambdas import as_lengths
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_floats,
    as_mask,
    broadcast,
    check_shapes,
    zero_masked,
    zero_per_row,
)


def extended_gae(
    rewards: Real[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    truncated: Shaped[ArrayLike, "*#batch"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    lam: Scalar | Float[ArrayLike, "*#batch #time"] = 0.95,
    bootstrap_value: Scalar | Float[ArrayLike, "*#batch"] | None = None,
    ignore_last: Number = 0,
) -> tuple[Float[Array, "*batch time"], Float[Array, "*batch time"], Bool[Array, "*batch time"]]:
    """Generalised advantage estimation when some responses are not finished yet (T-PPO).

    As `gae`, with the value after the last sampled token ``l - 1`` of a *truncated* response

        V_l = V_{l-1}            without `bootstrap_value`, the assumption of the paper
        V_l = bootstrap_value    with it

    and ``V_l = 0`` for a finished one. Under the assumption the last temporal-difference error is
    ``r_{l-1} + (gamma_{l-1} - 1) V_{l-1}``, which is 0 at ``gamma = 1`` without a reward. With a
    perfect critic only that error is biased, by the advantage of the last action, and earlier
    tokens carry it with weights ``(gamma lam)^k``; the critic's output *after* the last token is
    usually computed anyway, and as `bootstrap_value` it removes the bias. A cut must not be taken
    for an end: ``V_l = 0`` would punish every unfinished response.

    The last `ignore_last` tokens of a truncated response, which depend most on the boundary, get
    advantage 0 and leave the mask that is returned: use that mask for `whiten` and for the policy's
    loss. The release of T-PPO ignores 8; its whitening and its clamp of advantages to [-10, 10]
    are not done here.

    Args:
      rewards: one per token; the verifier's reward only where the response has ended.
      values: the critic's estimate of the state before each token.
      mask: true on the sampled tokens of the current window; holes are legal.
      truncated: one per row; true where the response goes on after the window.
      gamma: the discount, in [0, 1]; a scalar or an array as for `gae`.
      lam: how far to trust rewards over values, as for `gae`; in T-PPO
        ``length_adaptive_lambda(effective_length(...), floor=0.95)[:, None]``.
      bootstrap_value: the value of the state after the last sampled token, one per row; read on
        truncated rows only. None assumes it unchanged.
      ignore_last: how many sampled tokens at the end of truncated rows to leave out.

    Returns:
      `(advantages, returns, kept_mask)`, the first two 0 where `mask` is false and without a
      gradient. Returns, ``A + V`` before anything is ignored, cover all of `mask`; the critic of
      T-PPO learns from finished rows only, ``mask & ~truncated[:, None]``.

    Raises:
      ValueError: if `ignore_last` is negative, or shapes do not fit.

    References:
      Fan et al., "Truncated proximal policy optimization", 2025. https://arxiv.org/abs/2506.15050

    Examples:
      >>> import jax.numpy as jnp
      >>> values = jnp.array([0.5, 0.25, 0.75])
      >>> ones, zeros = jnp.ones(3), jnp.zeros(3)
      >>> cut = extended_gae(zeros, values, ones, jnp.array(True), lam=1.0, ignore_last=1)
      >>> cut[0].tolist(), cut[2].tolist()
      ([0.25, 0.5, 0.0], [True, True, False])
    """
    check_shapes(rewards=rewards, values=values, mask=mask)
    rule = "must not be negative: 0 keeps every token."
    ignore_last = settings.number("ignore_last", ignore_last, rule, at_least=0)
    mask = as_mask(mask)
    rewards, values = as_floats(rewards, values)
    # With how many true tokens, itself among them, the row ends; the last one has 1.
    remaining = jnp.flip(jnp.cumsum(jnp.flip(mask, -1), -1, dtype=jnp.int32), -1)
    nothing = zero_per_row(values)
    truncated = broadcast("truncated", as_mask(truncated), nothing) != 0
    if bootstrap_value is None:
        bootstrap_value = jnp.sum(zero_masked(values, mask & (remaining == 1)), -1)
    advantages, returns = gae(
        rewards,
        values,
        mask,
        gamma=gamma,
        lam=lam,
        bootstrap_value=bootstrap_value,
        terminated=~truncated,
    )
    retained = mask & ~(truncated[..., None] & (remaining <= ignore_last))
    return zero_masked(advantages, retained), returns, retained


def effective_length(
    lengths: Real[ArrayLike, "*batch"],
    truncated: Shaped[ArrayLike, "*batch"],
    *,
    window: Number,
) -> Float[Array, "*batch"]:
    """The length that a response is taken to have while it is still being written.

    ``l + window / 2`` where it is truncated, ``l`` where it has ended: an unfinished response ends
    somewhere within the next window, in the middle on average. It is the length from which T-PPO
    takes its lam, ``length_adaptive_lambda(effective_length(...), alpha=0.05, floor=0.95)``.

    Args:
      lengths: sampled tokens so far, those of earlier windows included.
      truncated: one per response; true where it goes on after the window.
      window: tokens that are sampled per round, positive.

    Returns:
      One length per response, in tokens.

    Raises:
      ValueError: if `window` is not positive.

    References:
      Fan et al., "Truncated proximal policy optimization", 2025, and its release.
      https://arxiv.org/abs/2506.15050

    Examples:
      >>> import jax.numpy as jnp
      >>> effective_length(jnp.array([300, 8192]), jnp.array([False, True]), window=8192).tolist()
      [300.0, 12288.0]
    """
    check_shapes(lengths=lengths, truncated=truncated)
    rule = "must be positive: it is the tokens of one round."
    window = settings.number("window", window, rule, above=0)
    lengths = as_lengths(lengths)
    return jnp.where(as_mask(truncated), lengths + window / 2, lengths)
