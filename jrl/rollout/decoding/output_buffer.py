"""Output buffer of finished rows, which are copied out of their slots for a batch."""

from functools import cache as remembered
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.rollout.decoding.programs.slots import TokenRows


def make_output_buffer(
    rows: TokenRows[Array], size: int, sharding: NamedSharding
) -> TokenRows[Array]:
    """Empty output buffer for `size` rows such as these.

    Args:
      sharding: sharding of the buffer.
    """
    leaves, structure = jax.tree.flatten(rows)
    return structure.unflatten(
        _compiled_zeros(sharding, size, tuple((x.shape[1:], x.dtype) for x in leaves))()
    )


@remembered
def _compiled_zeros(sharding: NamedSharding, size: int, leaves: tuple[tuple[Any, Any], ...]) -> Any:
    return jax.jit(
        lambda: [jnp.zeros((size, *shape), dtype) for shape, dtype in leaves],
        out_shardings=sharding,
    )


def write_to_buffer(
    buffer: TokenRows[Array], rows: TokenRows[Array], destinations: Array, sharding: NamedSharding
) -> TokenRows[Array]:
    """Copies rows of a pool into the output buffer.

    Args:
      buffer: the buffer, donated.
      destinations: ``[slot]`` destination of each slot's row, unique; past the end drops it.
      sharding: sharding of the buffer.
    """
    return _compiled_write(sharding)(buffer, rows, destinations)


@remembered
def _compiled_write(sharding: NamedSharding) -> Any:
    def write(
        buffer: TokenRows[Array], rows: TokenRows[Array], destinations: Array
    ) -> TokenRows[Array]:
        return jax.tree.map(
            lambda into, new: into.at[destinations].set(new, mode="drop", unique_indices=True),
            buffer,
            rows,
        )

    return jax.jit(write, donate_argnums=0, out_shardings=sharding)
