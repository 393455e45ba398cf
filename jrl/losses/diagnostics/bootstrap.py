"""The bias that errors of the critic bring into the policy gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.advantages import gae
from jrl.losses.arrays import Scalar, check_shapes, spread
from jrl.losses.diagnostics import tokens
from jrl.losses.diagnostics.lambdas import last_weight


class BootstrapBias(NamedTuple):
    """How large the bias is, and how large it could be.

    Attributes:
      bias: mean of ``|B_t|`` over tokens.
      bound: mean of ``max_k |e_k| (1 - lam^(T-1-t))``, with the maximum over the response.
      relative: `bias` over the standard deviation of the advantages.
    """

    bias: Float[Array, ""]
    bound: Float[Array, ""]
    relative: Float[Array, ""]


def bootstrap_bias(
    errors: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    lam: Scalar | Float[ArrayLike, "*#batch #time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
) -> Float[Array, "*batch time"]:
    """The part of each advantage's error that biases the policy gradient.

    Let ``e_t = V_t - V^pi_t`` be the errors of the critic, and 0 after the end. Exactly,

        A_t(V) - A_t(V^pi) = -e_t + B_t
        B_t = (1 - lam) sum_{k >= 1} lam^(k-1) e_{t+k}              (without a discount)

    The first term depends on the state alone, a baseline, and biases nothing. The second depends on
    the action through the states that follow. ``|B_t| <= max |e| (1 - lam^(T-1-t))``, and in
    general it vanishes only with ``lam = 1``.

    **Concern**: value approximation (2505.17997), and that decoupling the two lambdas does not take
    the critic's errors out of the policy's advantages (2506.03038).

    **Reading it.** Compare with the spread of the advantages (`bootstrap_bias_bound`): where the
    bias comes near it, the policy learns the critic's errors. It is largest early in a response
    and falls to 0 on the last token.

    Args:
      errors: of the critic, in units of reward. If V^pi is not known, ``V - G`` with a Monte-Carlo
        return has these errors as its mean: average the result over responses before taking its
        size, for the size of a noisy bias is too large.
      mask: true on sampled tokens.
      lam: of the advantages; a scalar or an array that spreads, as for `gae`.
      gamma: their discount.

    Returns:
      ``B_t`` of each token, 0 where the mask is false; without a gradient.

    Raises:
      ValueError: if shapes do not agree.

    References:
      Shao and Cheng, 2025. https://arxiv.org/abs/2505.17997 and https://arxiv.org/abs/2506.03038

    >>> import jax.numpy as jnp
    >>> errors = jnp.array([0.2, 0.15, 0.1, 0.05, 0.02])
    >>> [round(float(b), 6) for b in bootstrap_bias(errors, jnp.ones(5), 0.9)]
    [0.029508, 0.01612, 0.0068, 0.002, 0.0]
    """
    check_shapes(errors=errors, mask=mask)
    mask, (errors,) = tokens.hidden(mask, errors)
    # Advantages are linear in rewards and values: those of the errors alone are -e_t + B_t.
    return gae(jnp.zeros_like(errors), errors, mask, gamma=gamma, lam=lam)[1]


def bootstrap_bias_bound(
    errors: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    lam: Scalar | Float[ArrayLike, "*#batch #time"],
) -> BootstrapBias:
    """The bias of `bootstrap_bias` in three numbers: its size, its bound, its share of the signal.

    **Concern**: as for `bootstrap_bias`.

    **Reading it.** ``relative`` near 0: whatever is wrong with the critic does not reach the
    policy. Near 1: what the policy learns is as much the critic's errors as the rewards. Then raise
    lam, or train the critic longer.

    Args:
      errors: of the critic, in units of reward, see `bootstrap_bias`.
      advantages: that the policy learns from, in the same units (before whitening).
      mask: true on sampled tokens.
      lam: of the advantages; a scalar or an array that spreads, as for `gae`.

    Returns:
      A `BootstrapBias`.

    Raises:
      ValueError: if shapes do not agree.

    References:
      As for `bootstrap_bias`.

    >>> import jax.numpy as jnp
    >>> errors = jnp.array([[0.5, 0.5]])
    >>> found = bootstrap_bias_bound(errors, jnp.array([[1.0, -1.0]]), jnp.ones((1, 2)), 0.5)
    >>> float(found.bias), float(found.bound), float(found.relative)
    (0.125, 0.125, 0.125)
    """
    check_shapes(errors=errors, advantages=advantages, mask=mask)
    bias = bootstrap_bias(errors, mask, lam)
    mask, (errors, advantages) = tokens.hidden(mask, errors, advantages)
    largest = jnp.max(jnp.abs(errors), axis=-1, keepdims=True, initial=0)
    decay = jax.lax.stop_gradient(spread("lam", lam, errors))
    bound = largest * (1 - last_weight(mask, decay))
    centre = tokens.mean(advantages, mask)
    deviation = jnp.sqrt(tokens.mean((advantages - centre) ** 2, mask))
    size = tokens.mean(jnp.abs(bias), mask)
    return BootstrapBias(size, tokens.mean(bound, mask), tokens.ratio(size, deviation))
