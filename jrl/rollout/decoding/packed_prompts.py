"""Packed prompts: they share rows, so that short and long ones need little padding together. Their
prefill, and the log-probabilities of their tokens.

`run_packed` is expensive to compile. It does not depend on the slots' cache, and is compiled for
each size of the rows. `copy_to_cache` is cheap to compile, for each pair of a row size and a cache
length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.rollout.decoding.scheduling.scheduler import AdmissionPlan, first_fit
from jrl.rollout.decoding.scheduling.sizes import row_count, shared_width, single_row_widths
from jrl.rollout.decoding.slots import Decoder, TopTokens, cache_specs, over_slots, prefilled_specs
from jrl.rollout.sampling import logprobs_of
from moe.cache import KEY_COLUMN, ROW, VALUE_COLUMN, Cache, cache_of, over_columns
from moe.config import Model, ModelConfig
from moe.head import logits_of
from moe.layers.depth import split_groups
from moe.model import Prefilled, for_prefill, run, run_with_kv
from moe.placement import specs
from moe.router.statistics import overflow_of
from moe.tokens.packing import pack_segments
from moe.weights import Transformer
from sharding.collectives import join_shards, local_shard, vary
from sharding.sharded_jit import MeshJit

Leaf = TypeVar("Leaf")

CHUNK = 64
"""Positions that are copied at a time."""
MAX_SCORED_CHUNK = 64
"""Tokens whose logits over the vocabulary are in memory at a time."""


@struct.dataclass
class Packing(Generic[Leaf]):
    """Packed rows of prompts.

    Attributes:
      tokens: ``[row, width]`` ids; no prompt crosses the end of a row.
      segments: ``[row, width]`` segment id, the prompt of its rank that each token belongs to, from
        1 to the slots of a rank; 0 is padding.
      positions: ``[row, width]`` position of each token in its prompt, from 0.
      ends: ``[slot]`` index of the last token of the slot's prompt, in the concatenated rows of its
        rank; 0 for a slot that has no prompt.
    """

    tokens: Leaf
    segments: Leaf
    positions: Leaf
    ends: Leaf


@struct.dataclass
class CacheCopies(Generic[Leaf]):
    """Copies of keys and values into slots: `CHUNK` positions at a time, or all if there are fewer.

    Attributes:
      slots: ``[copy]`` destination, an index within the rank.
      sources: ``[copy]`` first position in the concatenated prefill rows.
      positions: ``[copy]`` first position in the slot.
      counts: ``[rank]`` number of copies; entries after them are ignored.
    """

    slots: Leaf
    sources: Leaf
    positions: Leaf
    counts: Leaf


@dataclass(frozen=True)
class RowPlan:
    """Plan of the packed rows of an admission.

    Attributes:
      width: tokens of a row.
      num_rows: on each rank.
      starts: offsets of each rank's prompts in its concatenated rows.
    """

    width: int
    num_rows: int
    starts: list[list[int]]


def plan_rows(plan: AdmissionPlan, widths: Sequence[int]) -> RowPlan:
    """Plans packed rows by first fit, in the order of the prompts; one row if it holds all. Their
    width is one of `sizes.row_widths`, or a multiple for a single row."""
    lengths = [[len(ids) for ids in runs] for runs in plan.runs]
    width, *_ = single_row_widths(widths, max(map(sum, lengths))) or [
        shared_width(widths, max(map(max, filter(None, lengths))))
    ]
    starts = [first_fit(run_lengths, width) for run_lengths in lengths]
    # The maximum over ranks: the compiled function has one shape on all.
    needed = max(max(offsets) // width + 1 for offsets in starts if offsets)
    return RowPlan(width, row_count(needed), starts)


def make_packing(
    row_plan: RowPlan, plan: AdmissionPlan, slots: int, pad_id: int
) -> Packing[np.ndarray]:
    """Arrays of the packed rows, for `slots` slots in total."""
    ranks = len(row_plan.starts)
    shape = ranks, row_plan.num_rows * row_plan.width
    tokens = np.full(shape, pad_id, np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for rank, (runs, starts) in enumerate(zip(plan.runs, row_plan.starts, strict=True)):
        for segment, (ids, start) in enumerate(zip(runs, starts, strict=True), 1):
            span = slice(start, start + len(ids))
            tokens[rank, span], segments[rank, span] = ids, segment
            positions[rank, span] = np.arange(len(ids))
    ends = np.zeros(slots, np.int32)
    for slot, request, source in plan.assignments:
        # Ranks have equal ranges of slots, so a slot's index determines its rank.
        ends[slot] = row_plan.starts[slot * ranks // slots][source] + request.length - 1
    tokens, segments, positions = (
        x.reshape(-1, row_plan.width) for x in (tokens, segments, positions)
    )
    return Packing(tokens, segments, positions, ends)


def plan_cache_copies(
    row_plan: RowPlan, plan: AdmissionPlan, slots: int, max_length: int, cache_length: int
) -> CacheCopies[np.ndarray]:
    """Copies from packed rows into the KV cache of `slots` slots in total.

    Args:
      max_length: tokens of the longest row, which bounds the number of copies.
      cache_length: positions of the cache, at least the length of the longest prompt.
    """
    ranks = len(row_plan.starts)
    per_rank, size = slots // ranks, min(CHUNK, cache_length)
    rank_copies: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for slot, request, source in plan.assignments:
        rank, local_slot = divmod(slot, per_rank)
        start = row_plan.starts[rank][source]
        # The last copies of a slot overlap if its length is no multiple of their size.
        offsets = (min(c, cache_length - size) for c in range(0, request.length, size))
        rank_copies[rank] += [(local_slot, start + offset, offset) for offset in offsets]
    # A static shape for the maximum; `counts` are the actual numbers of copies.
    max_copies = per_rank * -(-max_length // min(CHUNK, max_length))
    table = np.zeros((ranks, max_copies, 3), np.int32)
    for rank, rows in enumerate(rank_copies):
        table[rank, : len(rows)] = np.reshape(rows, (-1, 3))
    counts = np.array(list(map(len, rank_copies)), np.int32)
    targets, sources, positions = np.moveaxis(table.reshape(-1, 3), 1, 0)
    return CacheCopies(targets, sources, positions, counts)


@partial(MeshJit, static_argnums=0)
def run_packed(decoder: Decoder, weights: Transformer[Array], packing: Packing[Array]) -> Prefilled:
    """Runs the prefill of packed prompts.

    Returns:
      Keys and values of all rows of a rank, concatenated to one row, with `CHUNK` positions of
      padding after them; the state of the last token of each slot's prompt. No expert ids.
    """
    mesh = decoder.mesh
    return jax.shard_map(
        partial(_run_packed_local, decoder),
        mesh=mesh.mesh,
        in_specs=(specs(decoder.model), over_slots(mesh)),
        out_specs=prefilled_specs(mesh, cache_specs(decoder)),
    )(weights, packing)


def _run_packed_local(
    decoder: Decoder, weights: Transformer[Array], packing: Packing[Array]
) -> Prefilled:
    model, mesh = Model(_scanned(decoder.config), decoder.mesh), decoder.mesh
    num_slots = packing.ends.shape[0]
    packed = pack_segments(
        packing.tokens, packing.segments, num_slots, model, positions=packing.positions
    )
    keep = partial(_to_cache_layout, packing.tokens.size)
    x, router, collected = run_with_kv(keep, vary(weights, mesh.axes), packed, model)
    cache = cache_of(split_groups(collected, model.config, decoder.step_config))
    (row_states,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    # Slots that have no prompt get the state of the first token; nothing reads it.
    states = row_states.reshape(-1, row_states.shape[-1])[packing.ends]
    return Prefilled(vary(cache, mesh.axes), states, None, overflow_of(router, model.config))


def _scanned(config: ModelConfig) -> ModelConfig:
    """Config of a prefill that is scanned over layers: there are many sizes of packed rows, and
    unrolled each takes long to compile."""
    config = for_prefill(config)
    return replace(config, execution=replace(config.execution, scan_layers=True))


def _to_cache_layout(num_tokens: int, *arrays: Array) -> tuple[Array, ...]:
    """Keys and values of a layer, or latent vectors, in the layout of a cache with one row."""

    def to_layout(x: Array, column: int) -> Array:
        # Padded by `CHUNK` positions: a slice that starts near the end would otherwise be clamped
        # to an earlier start.
        in_columns = jnp.moveaxis(x.reshape(1, num_tokens, *x.shape[1:]), 1, column)
        return jnp.pad(in_columns, [(0, 0)] * (4 + column) + [(0, CHUNK)] + [(0, 0)] * ~column)

    columns = KEY_COLUMN, VALUE_COLUMN
    return tuple(to_layout(x, column) for x, column in zip(arrays, columns, strict=False))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_to_cache(
    decoder: Decoder, cache: Cache[Array], prefilled: Cache[Array], cache_copies: CacheCopies[Array]
) -> Cache[Array]:
    """Copies the results of `run_packed` into the KV cache of the slots; donates the cache."""
    mesh, heads = decoder.mesh, cache_specs(decoder)
    return jax.shard_map(
        partial(_copy_to_cache_local, decoder),
        mesh=mesh.mesh,
        in_specs=(heads, heads, over_slots(mesh)),
        out_specs=heads,
    )(cache, prefilled, cache_copies)


def _copy_to_cache_local(
    decoder: Decoder, cache: Cache[Array], prefilled: Cache[Array], cache_copies: CacheCopies[Array]
) -> Cache[Array]:
    def copy(index: Array, cache: Cache[Array]) -> Cache[Array]:
        slot, source_start, position = (
            x[index] for x in (cache_copies.slots, cache_copies.sources, cache_copies.positions)
        )

        def copy_chunk(buffer: Array, source_cache: Array, axis: int | None) -> Array:
            assert axis is not None
            # The last chunk writes arbitrary values after its prompt, at positions that are
            # overwritten before they are read.
            size = min(CHUNK, buffer.shape[axis])
            chunk = lax.dynamic_slice_in_dim(source_cache, source_start, size, axis=axis)
            start: list[Any] = [0] * buffer.ndim
            start[ROW], start[axis] = slot, position
            return lax.dynamic_update_slice(buffer, chunk, start)

        return over_columns(copy_chunk, cache, prefilled)

    cache, prefilled, cache_copies = vary((cache, prefilled, cache_copies), decoder.mesh.axes)
    # The number of iterations may differ between ranks: there is no collective in the body.
    return lax.fori_loop(0, cache_copies.counts[0], copy, cache)


@struct.dataclass
class PackedScores(Generic[Leaf]):
    """Log-probabilities of the tokens of prompts in packed rows; the value of a prompt's first
    token is arbitrary.

    Attributes:
      logprobs: ``[row, width]`` log-probabilities in the policy at temperature 1, nats.
      ranks: ``[row, width]`` ranks of the tokens by their log-probability, 1 for the most probable.
      top_tokens: ``[row, width, k]`` top-k tokens of each position; None if not requested.
    """

    logprobs: Leaf
    ranks: Leaf
    top_tokens: TopTokens[Leaf] | None


PromptScores = PackedScores[np.ndarray]
"""Scores of one prompt from its second token on, ``[token - 1]``."""


def score_prompts(
    run: Callable[[Packing[np.ndarray], bool], PackedScores[np.ndarray]],
    prompts: Sequence[np.ndarray],
    *,
    widths: Sequence[int],
    ranks: int,
    pad_id: int,
    needs_top_tokens: bool,
) -> list[PromptScores]:
    """Scores prompts in one pass.

    Args:
      run: runs packed rows on the devices, with or without top tokens.
      prompts: ids of each, none longer than the last of `widths`.
      widths: allowed widths of rows (`jrl.rollout.decoding.scheduling.sizes.row_widths`).
      ranks: ranks that share the rows.
    """
    plan, placed = AdmissionPlan([[] for _ in range(ranks)]), list[tuple[int, int]]()
    for ids in prompts:
        rank = min(range(ranks), key=lambda rank: sum(map(len, plan.runs[rank])))
        placed.append((rank, len(plan.runs[rank])))
        plan.runs[rank].append(ids)
    rows = plan_rows(plan, widths)
    packed = run(make_packing(rows, plan, ranks, pad_id), needs_top_tokens)
    by_rank = jax.tree.map(
        lambda x: x.reshape(ranks, rows.num_rows * rows.width, *x.shape[2:]), packed
    )
    scores = []
    for ids, (rank, index) in zip(prompts, placed, strict=True):
        start = rows.starts[rank][index]
        span = slice(start + 1, start + len(ids))
        scores.append(jax.tree.map(lambda x, at=(rank, span): np.array(x[at]), by_rank))
    return scores


@partial(MeshJit, static_argnums=(0, 1))
def score_packed(
    decoder: Decoder, top: int, weights: Transformer[Array], packing: Packing[Array]
) -> tuple[PackedScores[Array], Array | None]:
    """Scores the tokens of packed rows.

    Args:
      top: number of top tokens of each position; 0 returns none.

    Returns:
      The scores, and the overflow of the expert buffers: unless it is 0 or None, call this again
      with dropless buffers.
    """
    mesh, rows = decoder.mesh, over_slots(decoder.mesh)
    return jax.shard_map(
        partial(_score_local, decoder, top),
        mesh=mesh.mesh,
        in_specs=(specs(decoder.model), rows),
        out_specs=(rows, PartitionSpec()),
    )(weights, packing)


def _score_local(
    decoder: Decoder, top: int, weights: Transformer[Array], packing: Packing[Array]
) -> tuple[PackedScores[Array], Array | None]:
    model, mesh = Model(_scanned(decoder.config), decoder.mesh), decoder.mesh
    num_tokens = packing.tokens.size
    packed = pack_segments(
        packing.tokens, packing.segments, num_tokens, model, positions=packing.positions
    )._replace(sequences=None)  # nothing is trained
    weights = vary(weights, mesh.axes)
    x, router = run(weights, packed, model)
    (states,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    # The state of a token predicts the next one.
    before = jnp.roll(states.reshape(num_tokens, -1), 1, axis=0)
    tokens = vary(packing.tokens.reshape(-1), mesh.axes)
    local = local_shard(before, mesh.sequence), local_shard(tokens, mesh.sequence)
    num_local = local[1].shape[0]
    chunk = next(size for size in range(MAX_SCORED_CHUNK, 0, -1) if num_local % size == 0)

    def score(inputs: tuple[Array, Array]) -> PackedScores[Array]:
        logits, tokens = logits_of(weights, inputs[0], model), inputs[1]
        top_tokens = None
        if top:
            best, ids = lax.top_k(logits, top)
            total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            top_tokens = TopTokens(ids.astype(jnp.int32), best - total)
        logit = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
        ranks = 1 + jnp.sum(logits > logit, axis=-1, dtype=jnp.int32)
        return PackedScores(logprobs_of(logits, tokens), ranks, top_tokens)

    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), local)
    scores = lax.map(score, chunks)
    shape = packing.tokens.shape

    def in_rows(values: Array) -> Array:
        values = join_shards(values.reshape(num_local, *values.shape[2:]), mesh.sequence)
        return values.reshape(*shape, *values.shape[1:])

    return jax.tree.map(in_rows, scores), overflow_of(router, model.config)
