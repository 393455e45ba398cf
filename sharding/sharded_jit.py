"""Compiled functions whose results are trees of sharded arrays."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from sharding.folding import FoldedMesh


def jit_sharded(build: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Compiles `build`, with its result sharded by `shardings`, a tree of the same structure.

    The compiled function itself returns a list: for fields that are None JAX would insert a marker,
    which a dataclass cannot hold.
    """
    leaf_shardings, structure = jax.tree.flatten(shardings)
    compiled = jax.jit(lambda *args: jax.tree.leaves(build(*args)), out_shardings=leaf_shardings)
    return lambda *args: structure.unflatten(compiled(*args))


def named_shardings(partition_specs: Any, mesh: FoldedMesh) -> Any:
    """NamedSharding of each PartitionSpec of a tree, on the devices of `mesh`.

    Raises:
      ValueError: for a mesh without devices.
    """
    if not isinstance(mesh.mesh, jax.sharding.Mesh):
        raise ValueError("shardings need real devices: use fold instead of fold_abstract.")
    return jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), partition_specs)


def abstract_array(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
