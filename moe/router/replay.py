"""Replayed routing: which tokens have choices on record, and how far a router agrees with them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from moe.precision import float32_product


def choices_dtype(num_experts: int) -> np.dtype:
    """The smallest dtype of recorded choices: ids of experts, and `num_experts` for none."""
    return np.min_scalar_type(num_experts)


def is_recorded(replay: Integer[Array, "token k"], num_experts: int) -> Bool[Array, "token"]:
    """Whether there are choices of a token: all its ids are those of experts."""
    return jnp.all((replay >= 0) & (replay < num_experts), axis=-1)


def agreement(
    own: Int[Array, "token k"],
    replay: Integer[Array, "token k"],
    multiplicity: Float[Array, "token"],
    num_experts: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How far the choices on record are those that the router makes by its own scores.

    A token's share is that of the ``k`` experts of its own that are on record, in whatever order:
    ``|own & recorded| / k``.

    Args:
      own: what the router chooses by itself.
      replay: what is on record.
      multiplicity: how often each token counts; 0 for padding.

    Returns:
      The sum of these shares over the tokens that have a record, and the number of these tokens.
    """
    counted = jnp.where(is_recorded(replay, num_experts), multiplicity, 0.0)
    same = jnp.any(own[:, :, None] == replay[:, None, :], axis=2)
    return float32_product(counted, jnp.mean(same.astype(jnp.float32), axis=1)), jnp.sum(counted)
