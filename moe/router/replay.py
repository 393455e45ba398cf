"""Routing replay: recorded expert ids of tokens, and their agreement with the router's own."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from moe.precision import float32_product


def choices_dtype(num_experts: int) -> np.dtype:
    """Smallest dtype of recorded expert ids, with `num_experts` for none."""
    return np.min_scalar_type(num_experts)


def is_recorded(replay: Integer[Array, "token k"], num_experts: int) -> Bool[Array, "token"]:
    """True for tokens with recorded expert ids: all of them are ids of experts."""
    return jnp.all((replay >= 0) & (replay < num_experts), axis=-1)


def agreement(
    selected: Int[Array, "token k"],
    replay: Integer[Array, "token k"],
    multiplicity: Float[Array, "token"],
    num_experts: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Agreement between recorded expert ids and those that the router selects by its own scores.

    A token's share is the fraction of the router's ``k`` experts that are recorded, in any order:
    ``|selected & recorded| / k``.

    Args:
      selected: expert ids that the router selects.
      replay: recorded expert ids.
      multiplicity: weight of each token; 0 for padding.

    Returns:
      The sum of these shares over the tokens that have a record, and the number of these tokens.
    """
    counted = jnp.where(is_recorded(replay, num_experts), multiplicity, 0.0)
    same = jnp.any(selected[:, :, None] == replay[:, None, :], axis=2)
    return float32_product(counted, jnp.mean(same.astype(jnp.float32), axis=1)), jnp.sum(counted)
