"""Records of arrays, some fields of which are None: programs that make them, and what these are
without their values."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding


def making(make: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """`make`, compiled, its result laid out by `shardings`, a record of the same structure.

    What the program itself gives is a list: JAX would fill the fields that are None with a marker,
    which no record can hold.
    """
    places, structure = jax.tree.flatten(shardings)
    program = jax.jit(lambda *given: jax.tree.leaves(make(*given)), out_shardings=places)
    return lambda *given: structure.unflatten(program(*given))


def described(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of an array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
