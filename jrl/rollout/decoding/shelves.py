"""Rows that are done, copied out of their slots to where a batch is made of them."""

from functools import cache as remembered
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.rollout.decoding.programs.slots import Rows, over_slots
from sharding.folding import FoldedMesh


def empty_shelf(rows: Rows[Array], size: int, mesh: FoldedMesh) -> Rows[Array]:
    """Room for `size` rows such as these."""
    leaves, structure = jax.tree.flatten(rows)
    return structure.unflatten(
        _clearing(mesh, size, tuple((x.shape[1:], x.dtype) for x in leaves))()
    )


@remembered
def _clearing(mesh: FoldedMesh, size: int, leaves: tuple[tuple[Any, Any], ...]) -> Any:
    return jax.jit(
        lambda: [jnp.zeros((size, *shape), dtype) for shape, dtype in leaves],
        out_shardings=NamedSharding(mesh.mesh, over_slots(mesh)),
    )


def shelve(shelf: Rows[Array], rows: Rows[Array], places: Array, mesh: FoldedMesh) -> Rows[Array]:
    """The shelf with some of the rows of a pool on it.

    Args:
      shelf: given up.
      places: ``[slot]`` where each slot's row goes; past the end leaves it out.
    """
    return _shelving(mesh)(shelf, rows, places)


@remembered
def _shelving(mesh: FoldedMesh) -> Any:
    def place(shelf: Rows[Array], rows: Rows[Array], places: Array) -> Rows[Array]:
        return jax.tree.map(
            lambda into, new: into.at[places].set(new, mode="drop", unique_indices=True),
            shelf,
            rows,
        )

    return jax.jit(
        place, donate_argnums=0, out_shardings=NamedSharding(mesh.mesh, over_slots(mesh))
    )
