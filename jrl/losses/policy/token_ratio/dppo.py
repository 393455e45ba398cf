"""DPPO: a step is bounded by how far probabilities move, not by their ratio."""

from typing import Literal, Unpack, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.policy.tokens import Loss, Tokens, clamped_log_ratio, prepare, reduce_surrogate
from jrl.losses.reduction import Aggregation, Denominators, Mean

ProbabilityDistance = Literal["tv", "kl"]


def dppo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    kind: ProbabilityDistance,
    max_divergence: settings.Sides,
    max_ratio: Number | None = 20.0,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of DPPO, to be minimised.

    With p and q the probabilities of a token under the current and the old policy, ``r = p / q``
    and sg the stop-gradient,

        l = -A sg(min(r, max_ratio)) log p        while the token is kept, and 0 otherwise

    A token is dropped if its probability has moved away from the old one, in the direction in which
    its advantage pushes it, by more than `max_divergence`, which may be two distances, (down, up):

    | kind | distance | dropped |
    |---|---|---|
    | ``tv`` | ``|p - q|`` | beyond up with A > 0, p > q, or beyond down with A <= 0, p < q |
    | ``kl`` | ``q log(q/p) + (1-q) log((1-q)/(1-p))`` | the same |

    The ratio of a rare token moves far while its probability hardly does: from 0.01 to 0.03 is a
    ratio of 3 and a distance of 0.02, from 0.9 to 0.95 a ratio of 1.06 and a distance of 0.05. PPO
    clips the first, this may keep it and drop the second.

    The value is that of a score-function estimate, not of a surrogate: only its gradient,
    ``-A min(r, max_ratio)`` where kept, means something. In the paper the old policy is the sampler
    itself, so that the ratio corrects for the mismatch, too: weigh it no second time.

    Dropped tokens have a loss of 0 and still count in the denominators.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that sampled them; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      kind: the distance: "tv" or "kl", verl's ``dppo_tv`` and ``dppo_kl``.
      max_divergence: how far a probability may move, a probability for "tv" and nats for "kl": one
        distance, or two as (down, up). One number means different things to the two kinds, so there
        is no default. (verl reads the two from ``clip_ratio_low`` and ``clip_ratio_high``, which
        are 0.2.)
      max_ratio: the cap of the ratio, above one; None is off. 20 in verl (``clip_ratio_c``).
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, and so is log p from below, where the gradient is then 0. None is off.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, where ``pg_clipfrac`` is the share of tokens that were
      dropped and ``pg_clipfrac_lower`` that of those whose ratio was capped.

    Raises:
      ValueError: if `kind` or the aggregation is unknown, `max_divergence` negative or `max_ratio`
        not above one, denominators stand beside ``aggregation=None``, or shapes do not agree.

    References:
      Qi et al., "Rethinking the trust region in LLM reinforcement learning", 2026.
      https://arxiv.org/abs/2602.04879

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> p, old, ones = jnp.array([0.03, 0.95]), jnp.array([0.01, 0.9]), jnp.ones(2)
      >>> def total(logprobs):
      ...     arrays = (logprobs, jnp.log(old), ones, ones)
      ...     losses, metrics = dppo_loss(
      ...         *arrays, kind="tv", max_divergence=0.03, aggregation=None
      ...     )
      ...     return jnp.sum(losses), metrics
      >>> slopes, metrics = jax.grad(total, has_aux=True)(jnp.log(p))
      >>> [round(float(slope), 4) for slope in -slopes], float(metrics["pg_clipfrac"].value())
      ([3.0, 0.0], 0.5)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    if kind not in get_args(ProbabilityDistance):
        raise ValueError(f"kind={kind!r} is neither 'tv' nor 'kl'.")
    bounds = settings.distance_pair("max_divergence", max_divergence)
    rule = "must be above 1, such as 20; None is off."
    max_ratio = settings.optional("max_ratio", max_ratio, rule, above=1)
    max_log_ratio = settings.optional_distance("max_log_ratio", max_log_ratio)
    current = jax.lax.stop_gradient(tokens.logprobs)
    log_ratio, statistics = clamped_log_ratio(tokens._replace(logprobs=current), max_log_ratio)
    weight = ratio = jnp.exp(log_ratio)
    if max_ratio is not None:
        weight = jnp.minimum(ratio, max_ratio)
    dropped = _dropped(tokens._replace(logprobs=current), kind, bounds)
    # The logarithm of a probability of 0 would meet a factor of 0, and its product is no number.
    logprobs = tokens.logprobs
    if max_log_ratio is not None:
        floor = jnp.maximum(tokens.old_logprobs - max_log_ratio, jnp.finfo(logprobs.dtype).min)
        logprobs = jnp.where(logprobs < floor, floor, logprobs)
    surrogate = jnp.where(dropped, jnp.zeros_like(weight), -tokens.advantages * weight * logprobs)
    capped = ratio > weight
    statistics = {
        "pg_clipfrac": dropped.astype(ratio.dtype),
        "pg_clipfrac_lower": (capped & ~dropped).astype(ratio.dtype),
        **statistics,
    }
    return reduce_surrogate(
        dppo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def _dropped(
    tokens: Tokens, kind: ProbabilityDistance, bounds: tuple[settings.Checked, settings.Checked]
) -> Bool[Array, "*batch time"]:
    """Mask of the tokens whose probability moved too far; false for masked tokens and for NaN."""
    down, up = bounds
    p, q = jnp.exp(tokens.logprobs), jnp.exp(tokens.old_logprobs)
    rises = tokens.advantages > 0
    falls = tokens.advantages <= 0
    if kind == "tv":
        return (rises & (p - q > up)) | (falls & (p - q < -down))
    sampled = _relative(q, tokens.old_logprobs, tokens.logprobs)
    others = -jnp.expm1(tokens.old_logprobs), -jnp.expm1(tokens.logprobs)
    rest = _relative(others[0], *(jnp.log(jnp.maximum(x, 0)) for x in others))
    moved = sampled + rest
    return (rises & (p > q) & (moved > up)) | (falls & (p < q) & (moved > down))


def _relative(
    probability: Float[Array, "*batch time"],
    log_first: Float[Array, "*batch time"],
    log_second: Float[Array, "*batch time"],
) -> Float[Array, "*batch time"]:
    """``probability * (log_first - log_second)``, and 0 where the probability is 0."""
    impossible = probability == 0
    difference = jnp.where(impossible, jnp.zeros_like(log_first), log_first - log_second)
    return probability * difference
