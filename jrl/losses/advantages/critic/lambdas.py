"""VAPO's lam for a response of each length."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Real

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    as_floats,
)


def as_lengths(lengths: Real[ArrayLike, "*batch"]) -> Float[Array, "*batch"]:
    """Lengths as floats: whole numbers in float64 where jax has it, as nothing else decides."""
    lengths = jnp.asarray(jax.lax.stop_gradient(lengths))
    if jnp.issubdtype(lengths.dtype, jnp.floating):
        return as_floats(lengths)[0]
    return lengths.astype(float)


def length_adaptive_lambda(
    lengths: Real[ArrayLike, "*batch"], *, alpha: Number = 0.05, floor: Number = 0.0
) -> Float[Array, "*batch"]:
    """VAPO's lam for a response of each length.

    ``lam(l) = max(1 - 1 / (alpha l), floor)``, so that the geometric weights of the
    temporal-difference errors sum to ``alpha l``. The weight of the terminal error on the first
    token tends to ``exp(-1 / alpha)`` whatever the length: the reach is a fixed *share* of the
    response, about 23 % of it (down to a weight of 1 %) with ``alpha = 0.05``.

    The expression is negative for ``alpha l < 1``. The floor decides what short responses get: 0,
    the default, is one-step TD (the form of NeMo-RL); 0.95 lets lam adapt only beyond 400 tokens
    (the form of verl's T-PPO).

    Args:
      lengths: sampled tokens per row, ``mask.sum(-1)``; 0 gives the floor.
      alpha: the share of a response that the errors reach, positive.
      floor: the least lam, in [0, 1].

    Returns:
      One lam per row, to be passed on with an axis more,
      ``gae(..., lam=lam[:, None])``.

    Raises:
      ValueError: if `alpha` is not positive or `floor` is outside [0, 1].

    References:
      Yue et al., "VAPO", 2025, section 4.2. https://arxiv.org/abs/2504.05118

    Examples:
      >>> import jax.numpy as jnp
      >>> length_adaptive_lambda(jnp.array([10, 40, 100]), alpha=0.05).round(3).tolist()
      [0.0, 0.5, 0.800000011920929]
    """
    rule = "must be positive: VAPO uses 0.05, later work 0.4 to 1.5."
    alpha = settings.number("alpha", alpha, rule, above=0)
    rule = "must lie in [0, 1], as every lam does."
    floor = settings.number("floor", floor, rule, at_least=0, at_most=1)
    lengths = as_lengths(lengths)
    return jnp.maximum(1 - 1 / (alpha * lengths), floor)
