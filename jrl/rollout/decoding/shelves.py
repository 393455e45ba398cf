"""Output buffer of finished rows, which are copied out of their slots for a batch."""

from functools import cache as remembered
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.rollout.decoding.programs.slots import Rows


def empty_shelf(rows: Rows[Array], size: int, place: NamedSharding) -> Rows[Array]:
    """Empty output buffer for `size` rows such as these.

    Args:
      place: sharding of the buffer.
    """
    leaves, structure = jax.tree.flatten(rows)
    return structure.unflatten(
        _clearing(place, size, tuple((x.shape[1:], x.dtype) for x in leaves))()
    )


@remembered
def _clearing(place: NamedSharding, size: int, leaves: tuple[tuple[Any, Any], ...]) -> Any:
    return jax.jit(
        lambda: [jnp.zeros((size, *shape), dtype) for shape, dtype in leaves],
        out_shardings=place,
    )


def shelve(
    shelf: Rows[Array], rows: Rows[Array], places: Array, place: NamedSharding
) -> Rows[Array]:
    """Copies rows of a pool into the output buffer.

    Args:
      shelf: the buffer, donated.
      places: ``[slot]`` destination of each slot's row, unique; past the end drops it.
      place: sharding of the buffer.
    """
    return _shelving(place)(shelf, rows, places)


@remembered
def _shelving(place_of: NamedSharding) -> Any:
    def place(shelf: Rows[Array], rows: Rows[Array], places: Array) -> Rows[Array]:
        return jax.tree.map(
            lambda into, new: into.at[places].set(new, mode="drop", unique_indices=True),
            shelf,
            rows,
        )

    return jax.jit(place, donate_argnums=0, out_shardings=place_of)
