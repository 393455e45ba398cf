"""Which row of a mini-batch goes where, so that no device runs more than it must.

Here, on the host, the rows of a mini-batch are dealt out to data-parallel ranks, micro-batches and
bins by what is counted of each (`Counts`), which all processes have. How many micro-batches that
takes is a number of run time (`jrl.trainer.learner.passes`), so that one program serves every
mini-batch.
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
"""Rows in a bin, at most: slots for more would be copies of what is known of every token."""


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
        # The two may learn from different tokens (T-PPO), and are packed by their own.
        counted = (self.actor if network == "actor" else self.critic)[rows]
        # No token at all is how `plan` is told to leave a row out.
        return np.where(idle | (counted > 0), self.valid[rows], 0), counted


class Plan(NamedTuple):
    """How the rows of a mini-batch are packed: in slots, a run of them for each micro-batch, those
    of a data-parallel rank one after the other.

    Attributes:
      rows: ``[slot]`` the row in each; any, where the slot is empty.
      starts: ``[slot]`` where the row begins, counted through the bins of its micro-batch; -1 in an
        empty slot.
      num_micro_batches: on each rank.
      passes: how many of them have rows, on the rank that has most.
      sizes: of each micro-batch.
    """

    rows: np.ndarray
    starts: np.ndarray
    num_micro_batches: int
    passes: int
    sizes: PackedSizes

    def slots(self, num_rows: int) -> np.ndarray:
        """``[num_rows]`` where each row is; an empty slot for those that are nowhere."""
        filled = np.flatnonzero(self.starts >= 0)
        # There are at least as many slots as rows: where a row is nowhere, some slot is empty.
        slots = np.full(num_rows, np.argmin(self.starts))
        slots[self.rows[filled]] = filled
        return slots


def counts_of(batch: Batch[Array]) -> Counts:
    """What a plan is made from; three numbers a row come to the host."""
    return Counts(*to_host(_counts(batch)))


def plan(
    tokens: np.ndarray,
    counted: np.ndarray,
    time: int,
    bins: int,
    mesh: FoldedMesh,
    rows_of_a_bin: int = ROWS_OF_A_BIN,
) -> Plan:
    """Deals out rows to ranks, bins and micro-batches: the longest row first, to the rank with the
    fewest tokens and there to the first bin that has room (first fit decreasing); then the bins
    with most that is counted first, to the micro-batch with the least.

    The shapes of a program depend on the number of rows and, rounded up, on how many tokens of a
    full micro-batch are counted; how many micro-batches have rows does not enter.

    Args:
      tokens: ``[rows]`` that are not padding; rows without any are in no bin.
      counted: ``[rows]`` of them that the head speaks about.
      time: tokens of a row at most.
      bins: of a micro-batch.
      rows_of_a_bin: at most.

    References:
      Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms",
      1974 (first fit decreasing takes 11/9 of the bins that are needed, at most and nearly).
    """
    # To ranks first, evenly by tokens, as all run as many passes as the fullest of them needs.
    length, ranks = bin_length(time, mesh), mesh.size(mesh.dp)
    filled = [_first_fit(rows, tokens, length, rows_of_a_bin) for rows in _of_ranks(tokens, ranks)]
    # A pass has collectives: none of the ranks can leave one out that another runs.
    passes = max(-(-max(map(len, filled)) // bins), 1)
    dealt = [_dealt_out(of_rank, counted, passes, bins) for of_rank in filled]
    # At most one row in each bin, where all have their full length.
    number = max(passes, -(-len(tokens) // (ranks * bins)))
    # Their number is a shape, so it is that of the worst case; `passes` says how many of them run.
    rows = np.zeros((ranks, number, bins * rows_of_a_bin), np.int64)
    # Empty until a row is put there: `_placed` masks what lies in such a slot.
    starts = np.full(rows.shape, -1, np.int64)
    # Few rows must not make another program of a micro-batch that they do not fill.
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
            # No micro-batch may hold more than the head has places for.
            most = max(most, int(counted[inside].sum()))
    # The places are cut over the ranks of cp and tp, so they divide by them.
    shards = mesh.size(mesh.sequence)
    sizes = PackedSizes(bins, length, -(-rounded_up(most) // shards) * shards)
    return Plan(rows.reshape(-1), starts.reshape(-1), number, passes, sizes)


def bin_length(time: int, mesh: FoldedMesh) -> int:
    """Tokens of a bin: the longest row fits in, and ``cp x tp`` ranks can share it."""
    length = ZigzagLayout(((1, time),), mesh.size(mesh.cp)).padded(time)
    # Whole parts for zig-zag, and equal shares for the ranks, whichever of the two asks for more.
    unit = np.lcm(ZigzagLayout((), mesh.size(mesh.cp)).padded(1), mesh.size(mesh.sequence))
    return int(-(-length // unit) * unit)


def rounded_up(number: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again, and two programs to
    compile for every doubling."""
    # Finer steps would waste fewer places and compile more programs: with each mini-batch the
    # number is another.
    power = 1 << max(number - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and number <= 3 * power // 4 else power


def place_rows(batch: Batch[Array], packed: Plan, mesh: FoldedMesh) -> Batch[Array]:
    """The rows in their slots; in those that are empty nothing is valid and nothing counts."""
    # A gather on the mesh: of the batch nothing passes through the host but where rows begin.
    starts = to_devices(packed.starts.astype(np.int32), over_rows(mesh))
    return _placed(take_rows(batch, packed.rows, mesh), starts)


@jax.jit
def without_idle(rows: Batch[Array]) -> Batch[Array]:
    """The rows, those that have no token under the mask without a valid one: they are not to be
    run, nor to count for the routers."""
    return replace(rows, valid=rows.valid & jnp.any(rows.mask, axis=1, keepdims=True))


def _of_ranks(tokens: np.ndarray, ranks: int) -> list[list[int]]:
    """The rows of each rank that have tokens, the longest first."""
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
    """The rows of each bin, which has at most so many; they come the longest first."""
    bins: list[list[int]] = []
    left: list[int] = []
    for row in rows:
        number = int(tokens[row])
        # By number too: slots of a bin are a shape.
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
    """The bins of each micro-batch, at most so many, each by its rows."""
    micro_batches: list[list[list[int]]] = [[] for _ in range(passes)]
    loads = np.zeros(passes, np.int64)
    of_bins = np.array([counted[own].sum() for own in bins], np.int64)
    # The head has places for what the fullest micro-batch counts: dealt out evenly these are few.
    for bin in np.argsort(-of_bins, kind="stable"):
        open_ = [n for n, micro_batch in enumerate(micro_batches) if len(micro_batch) < most]
        # One is always open: `passes` was counted for the rank with most bins.
        micro_batch = min(open_, key=lambda n: loads[n])
        micro_batches[micro_batch].append(bins[bin])
        loads[micro_batch] += of_bins[bin]
    return micro_batches


@jax.jit
def _counts(batch: Batch[Array]) -> tuple[Array, Array, Array]:
    # Without a mask of its own the critic learns where the policy does.
    critic = batch.mask if batch.critic_mask is None else batch.critic_mask
    masks = batch.valid, batch.mask, critic
    of_rows = [jnp.sum(mask, axis=1, dtype=jnp.int32) for mask in masks]
    return of_rows[0], of_rows[1], of_rows[2]


@jax.jit
def _placed(rows: Batch[Array], starts: Array) -> Batch[Array]:
    # A gather gives every slot some row: in an empty one it would count twice.
    filled = (starts >= 0)[:, None]
    return replace(rows, starts=starts, valid=rows.valid & filled, mask=rows.mask & filled)
