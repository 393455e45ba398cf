"""Packing plan of a mini-batch: assignment of rows to ranks, micro-batches and bins, load-balanced.

Rows are assigned on the host, by their token counts (`Counts`), which all processes have. The
number of micro-batches is dynamic (`jrl.trainer.learner.passes`), so that one compiled function
serves every mini-batch.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import Batch
from jrl.rollout.batching import over_rows, take_rows
from jrl.rollout.packing import PackedSizes
from moe.tokens.zigzag import ZigzagLayout
from sharding.folding import FoldedMesh

ROWS_OF_A_BIN = 4
"""Maximum rows of a bin: more slots would be more copies of every per-token array."""


class Counts(NamedTuple):
    """Token counts of each row of a batch, ``[batch]`` on the host.

    Attributes:
      valid: tokens that are not padding.
      actor: tokens in the policy's loss mask.
      critic: tokens in the critic's loss mask.
    """

    valid: np.ndarray
    actor: np.ndarray
    critic: np.ndarray

    def of(self, network: str, rows: np.ndarray, idle: bool) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of tokens of some rows that a network runs, and of those in its loss mask.

        Args:
          network: "actor" or "critic".
          idle: true to run rows without a token in the loss mask too.
        """
        # The two may have different loss masks (T-PPO), and are packed by their own.
        counted = (self.actor if network == "actor" else self.critic)[rows]
        # `plan` leaves out rows with 0 tokens.
        return np.where(idle | (counted > 0), self.valid[rows], 0), counted


class Plan(NamedTuple):
    """Packing of a mini-batch: slots for rows, a contiguous range of them for each micro-batch, in
    the order of the data-parallel ranks.

    Attributes:
      rows: ``[slot]`` the row in each; arbitrary where the slot is empty.
      starts: ``[slot]`` offset of the row in the concatenated bins of its micro-batch; -1 in an
        empty slot.
      num_micro_batches: on each rank.
      passes: number of micro-batches with rows, the maximum over ranks.
      sizes: of each micro-batch.
    """

    rows: np.ndarray
    starts: np.ndarray
    num_micro_batches: int
    passes: int
    sizes: PackedSizes

    def slots(self, num_rows: int) -> np.ndarray:
        """Slot of each row, ``[num_rows]``; an empty slot for rows that are left out."""
        filled = np.flatnonzero(self.starts >= 0)
        # There are at least as many slots as rows: if a row is left out, some slot is empty.
        slots = np.full(num_rows, np.argmin(self.starts))
        slots[self.rows[filled]] = filled
        return slots


def counts_of(batch: Batch[Array]) -> Counts:
    """Token counts of a batch for a plan; three numbers per row are copied to the host."""
    return Counts(*to_host(_counts(batch)))


def plan(
    tokens: np.ndarray,
    counted: np.ndarray,
    time: int,
    bins: int,
    mesh: FoldedMesh,
    rows_of_a_bin: int = ROWS_OF_A_BIN,
) -> Plan:
    """Assigns rows to ranks, bins and micro-batches. The longest row comes first, to the rank with
    the fewest tokens and there to the first bin with space (first fit decreasing). Then bins are
    assigned, those with most loss tokens first, to the micro-batch with the fewest.

    Shapes depend on the number of rows and, rounded up, on the loss tokens of a full micro-batch;
    not on the number of micro-batches that have rows.

    Args:
      tokens: ``[rows]`` number of tokens that are not padding; rows without any are left out.
      counted: ``[rows]`` number of those in the loss mask, which the LM head scores.
      time: maximum tokens of a row.
      bins: of a micro-batch.
      rows_of_a_bin: maximum number of rows of a bin.

    References:
      Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms",
      1974 (first fit decreasing takes 11/9 of the bins that are needed, at most and nearly).
    """
    # To ranks first, evenly by tokens, as all run as many passes as the fullest of them needs.
    length, ranks = bin_length(time, mesh), mesh.size(mesh.dp)
    filled = [_first_fit(rows, tokens, length, rows_of_a_bin) for rows in _of_ranks(tokens, ranks)]
    # A pass has collectives: all ranks must run the same number.
    passes = max(-(-max(map(len, filled)) // bins), 1)
    dealt = [_dealt_out(of_rank, counted, passes, bins) for of_rank in filled]
    # In the worst case one row per bin, where all have their full length.
    number = max(passes, -(-len(tokens) // (ranks * bins)))
    # A static shape, so it is that of the worst case; `passes` is how many of them run.
    rows = np.zeros((ranks, number, bins * rows_of_a_bin), np.int64)
    # Empty by default: `_placed` masks empty slots.
    starts = np.full(rows.shape, -1, np.int64)
    # Estimated for full micro-batches, so that few rows do not compile another size.
    num_bins = max(sum(map(len, filled)), 1)
    most = -(-int(counted[tokens > 0].sum()) * bins // num_bins)
    for rank, of_rank in enumerate(dealt):
        for micro_batch, own_bins in enumerate(of_rank):
            inside = [row for own in own_bins for row in own]
            rows[rank, micro_batch, : len(inside)] = inside
            starts[rank, micro_batch, : len(inside)] = [
                bin * length + int(tokens[own[:n]].sum())
                for bin, own in enumerate(own_bins)
                for n in range(len(own))
            ]
            # No micro-batch may have more loss tokens than the LM head's buffer.
            most = max(most, int(counted[inside].sum()))
    # The buffer is sharded over the ranks of cp and tp, so it divides by them.
    shards = mesh.size(mesh.sequence)
    sizes = PackedSizes(bins, length, -(-rounded_up(most) // shards) * shards)
    return Plan(rows.reshape(-1), starts.reshape(-1), number, passes, sizes)


def bin_length(time: int, mesh: FoldedMesh) -> int:
    """Tokens of a bin: at least the longest row, divisible over ``cp x tp`` ranks."""
    length = ZigzagLayout(((1, time),), mesh.size(mesh.cp)).padded_length(time)
    # A multiple of the parts of zig-zag and of the number of ranks.
    unit = np.lcm(ZigzagLayout((), mesh.size(mesh.cp)).padded_length(1), mesh.size(mesh.sequence))
    return int(-(-length // unit) * unit)


def rounded_up(number: int) -> int:
    """Rounds up to one of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most 1.5 times as much, with two sizes
    to compile for every doubling."""
    # Finer steps would waste less buffer and compile more sizes: the number differs between
    # mini-batches.
    power = 1 << max(number - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and number <= 3 * power // 4 else power


def place_rows(batch: Batch[Array], packed: Plan, mesh: FoldedMesh) -> Batch[Array]:
    """Moves the rows to their slots; empty slots have no valid token and an empty loss mask."""
    # A gather on the mesh: only the offsets of rows come from the host.
    starts = to_devices(packed.starts.astype(np.int32), over_rows(mesh))
    return _placed(take_rows(batch, packed.rows, mesh), starts)


@jax.jit
def without_idle(rows: Batch[Array]) -> Batch[Array]:
    """Clears `valid` of rows without a token in the loss mask, so that they affect neither the
    computation nor the routers' balance."""
    return replace(rows, valid=rows.valid & jnp.any(rows.mask, axis=1, keepdims=True))


def _of_ranks(tokens: np.ndarray, ranks: int) -> list[list[int]]:
    """Assigns the rows that have tokens to ranks, the longest first."""
    of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks, np.int64)
    # Stable, as every process makes the plan for itself: rows of one length keep their order.
    for row in np.argsort(-tokens, kind="stable"):
        if tokens[row]:
            rank = int(np.argmin(loads))
            of_ranks[rank].append(int(row))
            loads[rank] += tokens[row]
    return of_ranks


def _first_fit(rows: list[int], tokens: np.ndarray, length: int, most: int) -> list[list[int]]:
    """Packs rows, given in descending length, into bins by first fit, at most `most` per bin."""
    bins: list[list[int]] = []
    left: list[int] = []
    for row in rows:
        number = int(tokens[row])
        # The number of rows is limited too: slots of a bin are a static shape.
        fits = (n for n, own in enumerate(bins) if left[n] >= number and len(own) < most)
        bin = next(fits, len(bins))
        if bin == len(bins):
            bins.append([])
            left.append(length)
        bins[bin].append(row)
        left[bin] -= number
    return bins


def _dealt_out(
    bins: list[list[int]], counted: np.ndarray, passes: int, most: int
) -> list[list[list[int]]]:
    """Assigns bins to micro-batches, at most `most` to each, balanced by loss tokens."""
    micro_batches: list[list[list[int]]] = [[] for _ in range(passes)]
    loads = np.zeros(passes, np.int64)
    of_bins = np.array([counted[own].sum() for own in bins], np.int64)
    # The LM head's buffer is sized for the fullest micro-batch: balancing keeps it small.
    for bin in np.argsort(-of_bins, kind="stable"):
        open_ = [n for n, micro_batch in enumerate(micro_batches) if len(micro_batch) < most]
        # One is always open: `passes` was counted for the rank with most bins.
        micro_batch = min(open_, key=lambda n: loads[n])
        micro_batches[micro_batch].append(bins[bin])
        loads[micro_batch] += of_bins[bin]
    return micro_batches


@jax.jit
def _counts(batch: Batch[Array]) -> tuple[Array, Array, Array]:
    # Without a mask of its own the critic uses that of the policy.
    critic = batch.mask if batch.critic_mask is None else batch.critic_mask
    masks = batch.valid, batch.mask, critic
    of_rows = [jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in masks]
    return of_rows[0], of_rows[1], of_rows[2]


@jax.jit
def _placed(rows: Batch[Array], starts: Array) -> Batch[Array]:
    # A gather fills every slot with some row: in an empty slot it would count twice.
    filled = (starts >= 0)[:, None]
    return replace(rows, starts=starts, valid=rows.valid & filled, mask=rows.mask & filled)
