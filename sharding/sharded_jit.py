"""Compiled functions whose results are trees of sharded arrays."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding


def jit_sharded(build: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Compiles `build`, with its result sharded by `shardings`, a tree of the same structure.

    The compiled function itself returns a list: for fields that are None JAX would insert a marker,
    which a dataclass cannot hold.
    """
    leaf_shardings, structure = jax.tree.flatten(shardings)
    compiled = jax.jit(lambda *args: jax.tree.leaves(build(*args)), out_shardings=leaf_shardings)
    return lambda *args: structure.unflatten(compiled(*args))


def abstract_array(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
