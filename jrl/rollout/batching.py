"""Rows of batches on the mesh: where they live, and how some of them are taken."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jrl.processes.agreement import to_devices
from jrl.recipes.base.batch import Batch
from jrl.rollout.requests import Trajectory
from sharding.folding import FoldedMesh


def over_rows(mesh: FoldedMesh) -> NamedSharding:
    """Where arrays with a row per sequence live."""
    return NamedSharding(mesh.mesh, PartitionSpec(mesh.dp))


def replicated(mesh: FoldedMesh) -> NamedSharding:
    """Where arrays live that every device holds."""
    return NamedSharding(mesh.mesh, PartitionSpec())


def take_rows(batches: Sequence[Batch[Array]], rows: np.ndarray, mesh: FoldedMesh) -> Batch[Array]:
    """Rows of the batches one after the other, on `mesh`: one program, nothing meets the host.

    Args:
      batches: on any mesh over the devices of `mesh`, in their order.
      rows: numbers of rows, counted through all batches.
    """
    # Without a place of its own XLA would choose one for them, which JAX then looks for on the mesh
    # of the batches, where it need not be.
    chosen = to_devices(rows.astype(np.int32), replicated(mesh))
    return _taking(over_rows(mesh))(tuple(batches), chosen)


def batch_of(
    trajectories: Sequence[Trajectory], counts: np.ndarray, mesh: FoldedMesh
) -> Batch[Array]:
    """The trajectories as rows, in their order.

    Args:
      counts: ``[trajectories]`` bool; the mask of the others is false throughout.
    """
    batches = list({id(t.batch): t.batch for t in trajectories}.values())
    sizes = [batch.tokens.shape[0] for batch in batches]
    offsets = dict(zip(map(id, batches), np.cumsum([0, *sizes[:-1]]), strict=True))
    rows = np.array([offsets[id(t.batch)] + t.row for t in trajectories])
    batch = take_rows(batches, rows, mesh)
    return batch if counts.all() else replace(batch, mask=_counted(batch.mask, counts))


@cache
def _taking(sharding: NamedSharding) -> Callable[[tuple[Any, ...], Array], Any]:
    def take(batches: tuple[Any, ...], rows: Array) -> Any:
        joined = jax.tree.map(lambda *columns: jnp.concatenate(columns), *batches)
        return jax.tree.map(lambda column: jnp.take(column, rows, axis=0), joined)

    return jax.jit(take, out_shardings=sharding)


@jax.jit
def _counted(mask: Array, counts: Array) -> Array:
    return mask & counts[:, None]
