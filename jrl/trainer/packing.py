"""Which row of a mini-batch goes where, so that no device runs more than it must.

A mini-batch is cut into pieces, one for each data-parallel rank and micro-batch. Here, on the host,
rows are dealt out to the pieces and within them to bins, by what is counted of each (`Counts`); the
sizes that a program is compiled for are rounded up, so that few programs are compiled. It is
decided by those counts alone, which all processes have.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import Batch
from jrl.rollout.batching import over_rows
from jrl.rollout.packing import PackedSizes
from moe.tokens.zigzag import ZigzagLayout
from sharding.folding import FoldedMesh


class Counts(NamedTuple):
    """Of each row of a batch, ``[batch]`` on the host.

    Attributes:
      valid: tokens that are not padding.
      actor: tokens that count for the policy.
      critic: tokens that count for the critic.
    """

    valid: np.ndarray
    actor: np.ndarray
    critic: np.ndarray

    def of(self, network: str, rows: np.ndarray, idle: bool) -> tuple[np.ndarray, np.ndarray]:
        """Of some rows, the tokens that a network runs, and those that count for it.

        Args:
          network: "actor" or "critic".
          idle: whether rows in which no token counts are run all the same.
        """
        counted = (self.actor if network == "actor" else self.critic)[rows]
        return np.where(idle | (counted > 0), self.valid[rows], 0), counted


class Plan(NamedTuple):
    """How the rows of a mini-batch are packed.

    Attributes:
      order: ``[rows]`` rows of the mini-batch, so that each piece has a run of them.
      starts: ``[rows]`` in that order: where the row begins, counted through the bins of its piece;
        -1 is in none.
      sizes: of every piece.
    """

    order: np.ndarray
    starts: np.ndarray
    sizes: PackedSizes


def counts_of(batch: Batch[Array]) -> Counts:
    """What a plan is made from; three numbers a row come to the host."""
    return Counts(*to_host(_counts(batch)))


def plan(
    tokens: np.ndarray, counted: np.ndarray, time: int, num_pieces: int, mesh: FoldedMesh
) -> Plan:
    """Deals out rows to pieces of equally many rows and to bins: the longest first, each to the
    piece with the fewest tokens that has room, and there to the first bin that has (first fit
    decreasing).

    Args:
      tokens: ``[rows]`` that are not padding; rows without any are in no bin.
      counted: ``[rows]`` of them that the head speaks about.
      time: tokens of a row at most.
      num_pieces: data-parallel ranks times micro-batches.

    References:
      Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms",
      1974 (first fit decreasing takes 11/9 of the bins that are needed, at most and nearly).
    """
    room = len(tokens) // num_pieces
    length = bin_length(time, mesh)
    pieces: list[list[int]] = [[] for _ in range(num_pieces)]
    loads = np.zeros(num_pieces, np.int64)
    for row in np.argsort(-tokens, kind="stable"):
        # Those that are full are out of the question; of equal ones the first.
        full = np.array([len(piece) == room for piece in pieces])
        piece = int(np.argmin(np.where(full, np.iinfo(np.int64).max, loads)))
        pieces[piece].append(int(row))
        loads[piece] += tokens[row]
    starts, bins = zip(*(_first_fit(tokens[piece], length) for piece in pieces), strict=True)
    most = max(int(counted[piece].sum()) for piece in pieces)
    ranks = mesh.size(mesh.sequence)
    sizes = PackedSizes(
        bins=min(rounded_up(max(bins)), room),
        length=length,
        places=-(-rounded_up(most) // ranks) * ranks,
    )
    return Plan(np.concatenate(pieces).astype(np.int64), np.concatenate(starts), sizes)


def bin_length(time: int, mesh: FoldedMesh) -> int:
    """Tokens of a bin: the longest row fits in, and ``cp x tp`` ranks can share it."""
    length = ZigzagLayout(((1, time),), mesh.size(mesh.cp)).padded(time)
    unit = np.lcm(ZigzagLayout((), mesh.size(mesh.cp)).padded(1), mesh.size(mesh.sequence))
    return int(-(-length // unit) * unit)


def rounded_up(number: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again, and two programs to
    compile for every doubling."""
    power = 1 << max(number - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and number <= 3 * power // 4 else power


def place_rows(rows: Batch[Array], starts: np.ndarray, mesh: FoldedMesh) -> Batch[Array]:
    """The rows with their places in the bins."""
    return replace(rows, starts=to_devices(starts.astype(np.int32), over_rows(mesh)))


@jax.jit
def without_idle(rows: Batch[Array]) -> Batch[Array]:
    """The rows, those that have no token under the mask without a valid one: they are not to be
    run, nor to count for the routers."""
    return replace(rows, valid=rows.valid & jnp.any(rows.mask, axis=1, keepdims=True))


def _first_fit(tokens: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """Where each row begins, -1 for those without tokens, and how many bins there are.

    Args:
      tokens: of each row, the longest first.
    """
    filled: list[int] = []
    starts = np.full(len(tokens), -1, np.int64)
    for row, number in enumerate(map(int, tokens)):
        if not number:
            continue
        bin = next((b for b, used in enumerate(filled) if used + number <= length), len(filled))
        if bin == len(filled):
            filled.append(0)
        starts[row] = bin * length + filled[bin]
        filled[bin] += number
    return starts, len(filled)


@jax.jit
def _counts(batch: Batch[Array]) -> tuple[Array, Array, Array]:
    critic = batch.mask if batch.critic_mask is None else batch.critic_mask
    masks = batch.valid, batch.mask, critic
    of_rows = [jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in masks]
    return of_rows[0], of_rows[1], of_rows[2]
