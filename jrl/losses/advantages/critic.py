"""Generalised advantage estimation (GAE) from a critic, and its length-adaptive lambda."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Real, Shaped

from jrl.losses import settings
from jrl.losses.advantages.recursion import discounted_errors
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_floats,
    as_mask,
    broadcast,
    broadcastable,
    check_shapes,
    zero_masked,
    zero_per_row,
)
from jrl.losses.settings import discount

__all__ = ["gae", "decoupled_gae", "length_adaptive_lambda", "extended_gae", "effective_length"]  # noqa: RUF022


def gae(
    rewards: Real[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    lam: Scalar | Float[ArrayLike, "*#batch #time"] = 0.95,
    bootstrap_value: Scalar | Float[ArrayLike, "*#batch"] | None = None,
    terminated: Shaped[ArrayLike, "*#batch"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch time"], Float[Array, "*batch time"]]:
    """Generalised advantage estimation (GAE) over the sampled tokens.

    With t+1 the *next unmasked token*, at any distance,

        delta_t = r_t + gamma_t V_{t+1} - V_t
        A_t     = delta_t + gamma_t lam_t A_{t+1}
        G_t     = A_t + V_t

    After the last such token, ``A = 0`` and V is 0 if the response ended, or `bootstrap_value` if
    it was truncated. This is GAE on the compressed sequence: a hole in the mask (a tool's answer,
    another speaker) adds no temporal-difference error and no factor of lam.

    **A reward must be on an unmasked token.** A reward on a masked token is ignored, as all masked
    values are. If a response ends in masked tokens, put the terminal reward on the last *sampled*
    token, not in the last column.

    **Packed sequences in one row** are separated by ``gamma=0`` on the last sampled token of each,
    which drops the value and the advantage that follow it.

    Libraries differ in the treatment of holes: verl and NeMo-RL skip them as here, OpenRLHF and
    older forks of verl use a value of 0 there, which adds two errors. `gae` does not whiten
    advantages (verl and OpenRLHF do it in the same function); call `whiten`.

    Args:
      rewards: one per token; usually zero except on the last sampled one.
      values: the critic's estimate of the state before each token.
      mask: true on sampled tokens; holes are allowed.
      gamma: the discount, in [0, 1]; a scalar, or an array with as many axes as `rewards` such as
        ``gamma[:, None]`` for one per row. It applies to the step from its token to the next.
      lam: lambda of GAE, from 0 (one-step TD error) to 1 (return minus value); of the same shapes
        as `gamma`.
      bootstrap_value: value of the state after the last sampled token, one per row, for truncated
        responses. None is 0, for responses that ended.
      terminated: one per row; true if the response ended, so that the value after it is 0, false if
        it was truncated and `bootstrap_value` applies. None applies `bootstrap_value` to all rows.
      implementation: "scan" iterates over tokens. "blocked" is equal up to rounding and faster on
        long rows, most of all if ``gamma lam`` is a scalar and the mask has no holes. None is
        "blocked" from 256 tokens on.

    Returns:
      `(advantages, returns)`, both 0 where the mask is false, gradients stopped. A fully
      masked row is all 0.

    Raises:
      ValueError: if `terminated` is given without `bootstrap_value`, or the implementation is
        unknown.

    References:
      Schulman et al., "High-dimensional continuous control using generalized advantage
      estimation", 2016, eq. 16. https://arxiv.org/abs/1506.02438

    Examples:
      >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.75])
      >>> advantages, returns = gae(rewards, values, jnp.ones(3), lam=1.0)
      >>> advantages.tolist(), returns.tolist()
      ([0.5, 0.75, 0.25], [1.0, 1.0, 1.0])
    """
    gamma, lam = discount("gamma", gamma), discount("lam", lam)
    check_shapes(rewards=rewards, values=values, mask=mask)
    if terminated is not None and bootstrap_value is None:
        raise ValueError(
            "terminated is given without bootstrap_value: without the value after truncated "
            "responses every response counts as ended; give both, or neither."
        )
    mask = as_mask(mask)
    rewards, values = as_floats(rewards, values)
    gamma, lam = broadcastable("gamma", gamma, values), broadcastable("lam", lam, values)
    last = ended = zero_per_row(values)
    if bootstrap_value is not None:
        last = broadcast("bootstrap_value", bootstrap_value, ended)
    if terminated is not None:
        last = jnp.where(broadcast("terminated", as_mask(terminated), ended) != 0, ended, last)

    advantages = discounted_errors(rewards, values, mask, gamma, lam, last, implementation)
    advantages = jax.lax.stop_gradient(advantages)
    return advantages, jax.lax.stop_gradient(zero_masked(advantages + values, mask))


def decoupled_gae(
    rewards: Real[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    lam_policy: Scalar | Float[ArrayLike, "*#batch #time"] = 0.95,
    lam_critic: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    bootstrap_value: Scalar | Float[ArrayLike, "*#batch"] | None = None,
    terminated: Shaped[ArrayLike, "*#batch"] | None = None,
) -> tuple[Float[Array, "*batch time"], Float[Array, "*batch time"]]:
    """Decoupled GAE of VC-PPO and VAPO: separate lambdas for advantages and critic targets.

        A_t = sum_k (prod gamma lam_policy) delta_{t+k}
        G_t = sum_k (prod gamma lam_critic) delta_{t+k} + V_t

    With a lam below 1, the terminal reward has almost no weight on the first tokens of a long
    response, and a critic trained on such targets stays near its initialisation. It is therefore
    trained on Monte Carlo returns (``lam_critic=1``), while a smaller lam lowers the variance of
    the policy gradient. With a perfect critic, the expected policy gradient does not depend on
    either lam.

    Args:
      rewards: one per token; usually zero except on the last sampled one.
      values: the critic's estimate of the state before each token.
      mask: true on sampled tokens; holes are allowed.
      gamma: the discount, in [0, 1]; a scalar or an array as for `gae`.
      lam_policy: the lam of the advantages; 0.95 in VC-PPO, and
        ``length_adaptive_lambda(mask.sum(-1))[:, None]`` in VAPO.
      lam_critic: the lam of the returns; 1 in both papers.
      bootstrap_value: value after the last sampled token, one per row, as for `gae`.
      terminated: true where `bootstrap_value` does not apply, as for `gae`.

    Returns:
      `(advantages, returns)`, both 0 where the mask is false, gradients stopped. Unless
      the two lams are equal, the returns are not ``advantages + values``.

    Raises:
      ValueError: if `terminated` is given without `bootstrap_value`.

    References:
      Yuan et al., "What's behind PPO's collapse in long-CoT? Value optimization holds the secret"
      (VC-PPO), 2025. https://arxiv.org/abs/2503.01491
      Yue et al., "VAPO", 2025. https://arxiv.org/abs/2504.05118

    Examples:
      >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.75])
      >>> advantages, returns = decoupled_gae(rewards, values, jnp.ones(3), lam_policy=0.0)
      >>> advantages.tolist(), returns.tolist()
      ([-0.25, 0.5, 0.25], [1.0, 1.0, 1.0])
    """
    lam_policy, lam_critic = discount("lam_policy", lam_policy), discount("lam_critic", lam_critic)
    estimate = partial(gae, gamma=gamma, bootstrap_value=bootstrap_value, terminated=terminated)
    arrays = rewards, values, mask
    return estimate(*arrays, lam=lam_policy)[0], estimate(*arrays, lam=lam_critic)[1]


def check_adaptive_lambda(alpha: Number, floor: Number) -> tuple[settings.Checked, ...]:
    """Validates the settings of `length_adaptive_lambda`."""
    rule = "must be positive: VAPO uses 0.05, later work 0.4 to 1.5."
    alpha = settings.number("alpha", alpha, rule, above=0)
    rule = "must lie in [0, 1], as every lam does."
    return alpha, settings.number("floor", floor, rule, at_least=0, at_most=1)


def length_adaptive_lambda(
    lengths: Real[ArrayLike, "*batch"], *, alpha: Number = 0.05, floor: Number = 0.0
) -> Float[Array, "*batch"]:
    """Length-adaptive lambda of VAPO: a GAE lambda that grows with the length of the response.

    ``lam(l) = max(1 - 1 / (alpha l), floor)``, so that the geometric weights of the
    temporal-difference errors sum to ``alpha l``. The weight of the terminal error on the first
    token tends to ``exp(-1 / alpha)`` for long responses: the horizon is a fixed *fraction* of the
    response, about 23 % of it (down to a weight of 1 %) with ``alpha = 0.05``.

    The expression is negative for ``alpha l < 1``. The floor sets lam for short responses: 0, the
    default, is one-step TD (as in NeMo-RL); 0.95 lets lam adapt only beyond 400 tokens, for the
    default `alpha` (as in verl's T-PPO).

    Args:
      lengths: sampled tokens per row, ``mask.sum(-1)``; 0 gives the floor.
      alpha: sum of the weights as a fraction of the response, positive.
      floor: lower bound of lam, in [0, 1].

    Returns:
      One lam per row, to be passed on with one more axis,
      ``gae(..., lam=lam[:, None])``.

    Raises:
      ValueError: if `alpha` is not positive or `floor` is outside [0, 1].

    References:
      Yue et al., "VAPO", 2025, section 4.2. https://arxiv.org/abs/2504.05118

    Examples:
      >>> length_adaptive_lambda(jnp.array([10, 40, 100]), alpha=0.05).round(3).tolist()
      [0.0, 0.5, 0.800000011920929]
    """
    alpha, floor = check_adaptive_lambda(alpha, floor)
    (lengths,) = as_floats(jax.lax.stop_gradient(lengths))
    return jnp.maximum(1 - 1 / (alpha * lengths), floor)


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
    """Extended GAE (EGAE) of T-PPO: GAE with unfinished (truncated) responses.

    As `gae`, with the value after the last sampled token ``l - 1`` of a *truncated* response

        V_l = V_{l-1}            without `bootstrap_value`, the assumption of the paper
        V_l = bootstrap_value    with it

    and ``V_l = 0`` for a finished one. With the paper's assumption, the last temporal-difference
    error is ``r_{l-1} + (gamma_{l-1} - 1) V_{l-1}``, which is 0 if ``gamma = 1`` and the reward is
    0. With a perfect critic only that error is biased, by the advantage of the last action, and the
    bias enters earlier tokens with weights ``(gamma lam)^k``. The critic's output *after* the last
    token, usually available, removes the bias as `bootstrap_value`. Truncation must not be treated
    as termination: ``V_l = 0`` would penalise every unfinished response.

    The last `ignore_last` tokens of a truncated response, which depend most on the boundary, get
    advantage 0 and are false in the returned mask: use that mask for `whiten` and for the policy
    loss. T-PPO's release ignores 8. Its whitening, and its clamp of advantages to [-10, 10], are
    not included.

    Args:
      rewards: one per token; the verifier's reward only for finished responses.
      values: the critic's estimate of the state before each token.
      mask: true on the sampled tokens of the current window; holes are allowed.
      truncated: one per row; true if the response continues after the window.
      gamma: the discount, in [0, 1]; a scalar or an array as for `gae`.
      lam: lambda of GAE, as for `gae`; in T-PPO
        ``length_adaptive_lambda(effective_length(...), floor=0.95)[:, None]``.
      bootstrap_value: value of the state after the last sampled token, one per row; used on
        truncated rows only. None is the paper's assumption.
      ignore_last: number of sampled tokens to mask at the end of truncated rows.

    Returns:
      `(advantages, returns, kept_mask)`, the first two 0 where `mask` is false and without a
      gradient. Returns, ``A + V`` without regard to `ignore_last`, cover all of `mask`; the critic
      of T-PPO is trained on finished rows only, ``mask & ~truncated[:, None]``.

    Raises:
      ValueError: if `ignore_last` is negative.

    References:
      Fan et al., "Truncated proximal policy optimization", 2025. https://arxiv.org/abs/2506.15050

    Examples:
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
    # Number of unmasked tokens from each token to the end of its row, itself included.
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
    lengths: Real[ArrayLike, "*batch"], truncated: Shaped[ArrayLike, "*batch"], *, window: Number
) -> Float[Array, "*batch"]:
    """Effective length of T-PPO: the estimated final length of unfinished responses.

    ``l + window / 2`` if truncated, ``l`` if finished: an unfinished response is assumed to end
    within the next window, in the middle on average. T-PPO computes lam from this length,
    ``length_adaptive_lambda(effective_length(...), alpha=0.05, floor=0.95)``.

    Args:
      lengths: sampled tokens so far, with earlier windows.
      truncated: one per response; true if it continues after the window.
      window: tokens sampled per rollout window, positive.

    Returns:
      One length per response, in tokens.

    Raises:
      ValueError: if `window` is not positive.

    References:
      Fan et al., "Truncated proximal policy optimization", 2025, and its release.
      https://arxiv.org/abs/2506.15050

    Examples:
      >>> effective_length(jnp.array([300, 8192]), jnp.array([False, True]), window=8192).tolist()
      [300.0, 12288.0]
    """
    check_shapes(lengths=lengths, truncated=truncated)
    rule = "must be positive: it is the tokens of one round."
    window = settings.number("window", window, rule, above=0)
    (lengths,) = as_floats(jax.lax.stop_gradient(lengths))
    return jnp.where(as_mask(truncated), lengths + window / 2, lengths)
