"""Packing plan of a mini-batch: assignment of rows to ranks, micro-batches and bins, load-balanced.

The valid tokens of rows are concatenated into bins of one length, so that padding costs next to
nothing; rows that take no part in a pass are in no bin. Rows are assigned on the host, by their
token counts (`TokenCounts`), which all processes have. Shapes are static; the number of
micro-batches is dynamic (`jrl.trainer.learner.accumulation.scan_first`), so that one compiled
function serves every mini-batch.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import Batch, over_rows, take_rows
from jrl.rollout.decoding.scheduling.scheduler import first_fit
from moe.disaggregated.balance import pack
from moe.ops.zigzag import ZigzagLayout
from sharding.folding import FoldedMesh

MAX_ROWS_PER_BIN = 4
"""Maximum rows of a bin: more slots would be more copies of every per-token array."""


class PackedSizes(NamedTuple):
    """Static sizes of a packed micro-batch on one data-parallel rank.

    Attributes:
      bins: rows of the packed batch.
      length: length of a bin, in tokens.
      max_scored: maximum number of tokens that the LM head scores.
    """

    bins: int
    length: int
    max_scored: int


class TokenCounts(NamedTuple):
    """Token counts of each row of a batch, ``[batch]`` on the host.

    Attributes:
      valid: tokens that are not padding.
      actor: tokens in the policy's loss mask.
      critic: tokens in the critic's loss mask.
    """

    valid: np.ndarray
    actor: np.ndarray
    critic: np.ndarray

    def for_network(
        self, network: str, rows: np.ndarray, idle: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of tokens of some rows that a network runs, and of those in its loss mask.

        Args:
          network: "actor" or "critic".
          idle: true to run rows that have no token in the loss mask too.
        """
        # The two may have different loss masks (T-PPO), and are packed by their own.
        loss_tokens = (self.actor if network == "actor" else self.critic)[rows]
        # `plan` leaves out rows with 0 tokens.
        return np.where(idle | (loss_tokens > 0), self.valid[rows], 0), loss_tokens


class PackingPlan(NamedTuple):
    """Packing of a mini-batch: slots for rows, a contiguous range of them for each micro-batch, in
    the order of the data-parallel ranks.

    Attributes:
      rows: ``[slot]`` the row in each; arbitrary if the slot is empty.
      starts: ``[slot]`` offset of the row in the concatenated bins of its micro-batch; -1 in an
        empty slot.
      num_micro_batches: on each rank.
      passes: number of micro-batches with rows, the maximum over ranks.
      sizes: sizes of each micro-batch.
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


def counts_of(batch: Batch[Array]) -> TokenCounts:
    """Token counts of a batch for a plan; three numbers per row are copied to the host."""
    return TokenCounts(*to_host(_counts(batch)))


def plan(
    tokens: np.ndarray,
    loss_tokens: np.ndarray,
    time: int,
    bins: int,
    mesh: FoldedMesh,
    max_rows_per_bin: int = MAX_ROWS_PER_BIN,
) -> PackingPlan:
    """Assigns rows to ranks, bins and micro-batches. The longest row comes first, to the rank with
    the fewest tokens and there to the first bin with space (first fit decreasing). Then bins are
    assigned, those with most loss tokens first, to the micro-batch with the fewest.

    Shapes depend on the number of rows and, rounded up, on the loss tokens of a full micro-batch;
    not on the number of micro-batches that have rows.

    Args:
      tokens: ``[rows]`` number of tokens that are not padding; rows of padding only are left out.
      loss_tokens: ``[rows]`` number of those in the loss mask, which the LM head scores.
      time: maximum tokens of a row.
      bins: number of bins of a micro-batch.
      max_rows_per_bin: maximum number of rows of a bin.

    References:
      Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms",
      1974 (first fit decreasing takes 11/9 of the bins that are needed, at most and nearly).
    """
    # To ranks first, evenly by tokens, as all run as many passes as the fullest of them needs.
    length, ranks = bin_length(time, mesh), mesh.size(mesh.dp)
    bins_of_ranks = [
        _pack_bins([row for row in rows if tokens[row]], tokens, length, max_rows_per_bin)
        for rows in _balance(tokens, ranks)
    ]
    # A pass has collectives: all ranks must run the same number.
    passes = max(-(-max(map(len, bins_of_ranks)) // bins), 1)
    # In the worst case all rows have their full length, one row per bin.
    num_micro_batches = max(passes, -(-len(tokens) // (ranks * bins)))
    # A static shape, so it is the worst case's; `passes` is how many of them run.
    rows = np.zeros((ranks, num_micro_batches, bins * max_rows_per_bin), np.int64)
    # Empty by default: `_mask_empty_slots` masks empty slots.
    starts = np.full(rows.shape, -1, np.int64)
    # Estimated for full micro-batches, so that few rows do not compile another size.
    num_bins = max(sum(map(len, bins_of_ranks)), 1)
    max_loss_tokens = -(-int(loss_tokens[tokens > 0].sum()) * bins // num_bins)
    for rank, rank_bins in enumerate(bins_of_ranks):
        # The LM head's buffer is sized for the fullest micro-batch: balancing keeps it small.
        loads = np.array([loss_tokens[bin_rows].sum() for bin_rows in rank_bins], np.int64)
        for micro_batch, indices in enumerate(_balance(loads, passes, bins)):
            micro_batch_bins = [rank_bins[index] for index in indices]
            micro_batch_rows = [row for bin_rows in micro_batch_bins for row in bin_rows]
            rows[rank, micro_batch, : len(micro_batch_rows)] = micro_batch_rows
            starts[rank, micro_batch, : len(micro_batch_rows)] = [
                bin * length + int(tokens[bin_rows[:n]].sum())
                for bin, bin_rows in enumerate(micro_batch_bins)
                for n in range(len(bin_rows))
            ]
            # No micro-batch may have more loss tokens than the LM head's buffer.
            max_loss_tokens = max(max_loss_tokens, int(loss_tokens[micro_batch_rows].sum()))
    # The buffer is sharded over the ranks of cp and tp, so it divides by them.
    shards = mesh.size(mesh.sequence)
    sizes = PackedSizes(bins, length, -(-round_up_size(max_loss_tokens) // shards) * shards)
    return PackingPlan(rows.reshape(-1), starts.reshape(-1), num_micro_batches, passes, sizes)


def bin_length(time: int, mesh: FoldedMesh) -> int:
    """Tokens of a bin: at least the longest row, divisible over ``cp x tp`` ranks."""
    length = ZigzagLayout(((1, time),), mesh.size(mesh.cp)).padded_length(time)
    # A multiple of the parts of zig-zag and of the number of ranks.
    unit = np.lcm(ZigzagLayout((), mesh.size(mesh.cp)).padded_length(1), mesh.size(mesh.sequence))
    return int(-(-length // unit) * unit)


def round_up_size(size: int) -> int:
    """Rounds up to one of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most 1.5 times as much, with two sizes
    to compile for every doubling."""
    # Finer steps would waste less buffer and compile more sizes: the size differs between
    # mini-batches.
    power = 1 << max(size - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and size <= 3 * power // 4 else power


def pack_rows(batch: Batch[Array], plan_of_batch: PackingPlan, mesh: FoldedMesh) -> Batch[Array]:
    """Moves the rows to their slots; empty slots have no valid token and an empty loss mask."""
    # A gather on the mesh: only the offsets of rows come from the host.
    starts = to_devices(plan_of_batch.starts.astype(np.int32), over_rows(mesh))
    return _mask_empty_slots(take_rows(batch, plan_of_batch.rows, mesh), starts)


@jax.jit
def clear_idle_rows(rows: Batch[Array]) -> Batch[Array]:
    """Clears `valid` of rows that have no token in the loss mask, so that they affect neither the
    computation nor the routers' balance."""
    return replace(rows, valid=rows.valid & jnp.any(rows.mask, axis=1, keepdims=True))


def _balance(loads: np.ndarray, num_buckets: int, max_items: int | None = None) -> list[list[int]]:
    """Assigns items to buckets, at most `max_items` to each, balanced by their loads; in each
    bucket the items with the greatest loads come first."""
    buckets = pack(loads.astype(float), num_buckets, max_items)
    # Stable, as every process makes the plan for itself: items of one load keep their order.
    order = np.argsort(-loads, kind="stable")
    return [order[buckets[order] == bucket].tolist() for bucket in range(num_buckets)]


def _pack_bins(rows: list[int], tokens: np.ndarray, length: int, max_rows: int) -> list[list[int]]:
    """Packs rows, given in descending length, into bins by first fit."""
    bins: list[list[int]] = []
    # The number of rows is limited too: slots of a bin are a static shape.
    for row, start in zip(rows, first_fit(tokens[rows].tolist(), length, max_rows), strict=True):
        if start // length == len(bins):
            bins.append([])
        bins[start // length].append(row)
    return bins


@jax.jit
def _counts(batch: Batch[Array]) -> list[Array]:
    # The critic uses the mask of the policy if it has no mask of its own.
    critic = batch.mask if batch.critic_mask is None else batch.critic_mask
    masks = batch.valid, batch.mask, critic
    return [jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in masks]


@jax.jit
def _mask_empty_slots(rows: Batch[Array], starts: Array) -> Batch[Array]:
    # A gather fills every slot with some row: in an empty slot it would count twice.
    filled = (starts >= 0)[:, None]
    return replace(rows, starts=starts, valid=rows.valid & filled, mask=rows.mask & filled)
