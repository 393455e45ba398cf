"""Dataclasses of arrays with None fields: compiled functions that return them, and their abstract
shapes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding


def making(make: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Compiles `make`, with its result sharded by `shardings`, a dataclass of the same structure.

    The compiled function itself returns a list: for fields that are None JAX would insert a marker,
    which the dataclass cannot hold.
    """
    places, structure = jax.tree.flatten(shardings)
    program = jax.jit(lambda *given: jax.tree.leaves(make(*given)), out_shardings=places)
    return lambda *given: structure.unflatten(program(*given))


def described(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
