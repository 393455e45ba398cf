"""Adaptive coefficients of the KL penalty and the entropy bonus.

Each function maps the current coefficient and a measurement to the next coefficient. The caller
stores the coefficient, and checkpoints it like other state.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jrl.losses import settings
from jrl.losses.arrays import Number, Scalar, as_floats


def adaptive_kl_coefficient(
    coefficient: Scalar, kl: Scalar, *, target: Number, num_samples: Scalar, horizon: Number
) -> Float[Array, ""]:
    """Adaptive KL coefficient: the next weight of a KL penalty that holds the KL near a target.

        coefficient (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon)

    A proportional controller on the relative error. The clip bounds the effect of one batch.

    Args:
      coefficient: weight of the penalty in this step, non-negative. 0 stays 0.
      kl: KL divergence measured in this step, in nats: the mean over tokens, or over responses of
        their sums (the original), as in `target`.
      target: target KL divergence, positive; 6 nats per response in the original.
      num_samples: number of responses measured; the change is proportional to it.
      horizon: responses over which the coefficient may change by about 20 %; 10000 originally.

    Returns:
      The coefficient for the next step (gradient stopped).

    Raises:
      ValueError: if `target` or `horizon` is not positive.

    References:
      Ziegler et al., "Fine-tuning language models from human preferences", 2019, section 2.2.
      https://arxiv.org/abs/1909.08593

    Examples:
      >>> round(float(adaptive_kl_coefficient(0.2, 3.0, target=6, num_samples=256, horizon=1e4)), 6)
      0.198976
    """
    rule = "must be positive, such as the original's."
    target = settings.number("target", target, rule, above=0)
    horizon = settings.number("horizon", horizon, rule, above=0)
    for name, x in (("coefficient", coefficient), ("kl", kl), ("num_samples", num_samples)):
        settings.check_scalar(name, x)
    coefficient, kl, num_samples = as_floats(*jax.lax.stop_gradient((coefficient, kl, num_samples)))
    error = jnp.clip(kl / target - 1, -0.2, 0.2)
    return coefficient * (1 + error * num_samples / horizon)


def adaptive_entropy_coefficient(
    coefficient: Scalar,
    entropy: Scalar,
    *,
    target: Number = 0.2,
    step: Number = 0.005,
    low: Number = 0.0,
    high: Number = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Adaptive entropy coefficient: the next weight of an entropy bonus applied at low entropy.

    If the measured entropy is at most `target`, the coefficient grows by `step` and the bonus is
    applied with the new coefficient. Otherwise the coefficient shrinks by `step` and no bonus is
    applied, so that entropy is never pushed above the target. The coefficient stays in [low, high].

    Args:
      coefficient: first result of the previous call, or the initial value.
      entropy: mean entropy over the tokens of this step, in nats.
      target: the bonus is applied at or below it; 0.2 is TRL's default (its example has 5.0).
      step: change of the coefficient per call; 0.005 is TRL's default.
      low: lower bound of the coefficient.
      high: upper bound of the coefficient.

    Returns:
      `(coefficient, applied)`, the coefficient to store and the weight of the bonus in this step;
      both without a gradient.

    Raises:
      ValueError: if `step` is negative, or `low` is above `high`.

    References:
      He et al., "Skywork Open Reasoner 1 technical report", 2025, section 4 (adaptive entropy
      control). https://arxiv.org/abs/2505.22312

    Examples:
      >>> [round(float(x), 3) for x in adaptive_entropy_coefficient(0.25, 0.125)]
      [0.255, 0.255]
      >>> [round(float(x), 3) for x in adaptive_entropy_coefficient(0.25, 0.5)]
      [0.245, 0.0]
    """
    rule = "cannot be negative: it is added while entropy is low."
    step = settings.number("step", step, rule, at_least=0)
    low, high = settings.span(low, high, "they bound the coefficient.", equal=True)
    target = settings.number("target", target)
    for name, x in (("coefficient", coefficient), ("entropy", entropy)):
        settings.check_scalar(name, x)
    coefficient, entropy = as_floats(*jax.lax.stop_gradient((coefficient, entropy)))
    scarce = entropy <= target
    coefficient = jnp.clip(jnp.where(scarce, coefficient + step, coefficient - step), low, high)
    return coefficient, jnp.where(scarce, coefficient, jnp.zeros_like(coefficient))
