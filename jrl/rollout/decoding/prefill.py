"""Admission of rows to slots: its arrays on the host, prefill, and sampling of the first token."""

from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jrl.rollout.decoding.scheduling.scheduler import AdmissionPlan
from jrl.rollout.decoding.slots import (
    Decoder,
    SamplerState,
    SlotPool,
    append_next_tokens,
    over_slots,
    pool_specs,
    prefilled_specs,
    run_prefill_local,
    sampler_state_specs,
)
from jrl.rollout.sampling import Sampling
from moe.cache import ROW, over_columns
from moe.config import ModelConfig
from moe.disaggregated.weights import rest_specs
from moe.head import logits_of
from moe.model import Prefilled
from moe.placement import specs
from moe.router.routing import choices_dtype
from moe.weights import Transformer
from sharding.collectives import local_shard, vary
from sharding.sharded_jit import MeshJit

Leaf = TypeVar("Leaf")


@struct.dataclass
class RestoredRows(Generic[Leaf]):
    """Restored state of admitted rows that were sampled before, as in `TokenRows`.

    Attributes:
      starts: ``[slot]``.
      behaviour_logprobs, old_logprobs, versions: ``[slot, width]``.
      choices: expert ids ``[slot, width, layer, k]``, or None; `num_experts` takes the expert ids
        of the row's prefill.
    """

    starts: Leaf
    behaviour_logprobs: Leaf
    old_logprobs: Leaf
    versions: Leaf
    choices: Leaf | None


@struct.dataclass
class AdmissionArrays(Generic[Leaf]):
    """Admitted rows, an entry per slot.

    Attributes:
      sources: ``[slot]`` source of the row's initial KV cache: the index of one of the prefill rows
        of the slot's rank or, without prefill, of another of its slots, whose row starts with the
        same tokens; -1 if no row is admitted.
      lengths: ``[slot]`` tokens of prompt and response so far.
      limits, responses, prompts, samples: as in `SlotPool`.
      restored: state of rows that were sampled before; None if there are none.
    """

    sources: Leaf
    lengths: Leaf
    limits: Leaf
    responses: Leaf
    prompts: Leaf
    samples: Leaf
    restored: RestoredRows[Leaf] | None = None


def make_admission(
    plan: AdmissionPlan, slots: int, width: int, decoder: Decoder
) -> AdmissionArrays[np.ndarray]:
    """Arrays of the admitted requests, an entry for each of all `slots`; `width` is at least the
    length of the longest row that is restored."""
    fields, per_rank = list[tuple[int, ...]](), slots // len(plan.runs)
    for _, request, source in plan.assignments:
        # `~source` is a global slot; the compiled function counts the slots of its own rank.
        source = source if source >= 0 else ~source % per_rank
        length, begin = request.length, len(request.tokens)
        fields.append((source, length, request.limit, begin, request.prompt, request.sample))
    # Vectorised: entry by entry this would take longer than the compiled function.
    arrays = np.zeros((6, slots), np.int32)
    arrays[0] = -1
    arrays[:, [slot for slot, *_ in plan.assignments]] = np.transpose(fields)
    return AdmissionArrays(*arrays, restored=_collect_restored(plan, slots, width, decoder))


def _collect_restored(
    plan: AdmissionPlan, slots: int, width: int, decoder: Decoder
) -> RestoredRows[np.ndarray] | None:
    """Restored state of rows that were sampled before; None if none was."""
    if all(request.sampled is None for _, request, _ in plan.assignments):
        return None
    restored = RestoredRows(
        starts=np.zeros(slots, np.int32),
        behaviour_logprobs=np.zeros((slots, width), np.float32),
        old_logprobs=np.zeros((slots, width), np.float32),
        versions=np.zeros((slots, width), np.int32),
        choices=no_choices(decoder.config, slots, width) if decoder.records_choices else None,
    )
    for slot, request, _ in plan.assignments:
        restored.starts[slot], sampled = request.start, request.sampled
        if sampled is None:
            continue
        span = slice(request.start, request.start + len(sampled.tokens))
        restored.behaviour_logprobs[slot, span] = sampled.behaviour_logprobs
        restored.old_logprobs[slot, span] = sampled.old_logprobs
        restored.versions[slot, span] = sampled.versions
        # From the first prompt token on: router replay covers prompt tokens too.
        if restored.choices is not None and sampled.choices is not None:
            restored.choices[slot, : len(sampled.choices)] = sampled.choices
    return restored


def no_choices(config: ModelConfig, rows: int, length: int) -> np.ndarray:
    """Expert ids ``[row, position, layer, k]`` of rows that recorded none: `num_experts`
    everywhere."""
    shape = (rows, length, config.num_expert_layers, config.experts_per_token)
    return np.full(shape, config.num_experts, choices_dtype(config.num_experts))


@partial(MeshJit, static_argnums=(0, 1), donate_argnums=3)
def admit(
    decoder: Decoder,
    sampling: Sampling,
    weights: Transformer[Array],
    pool: SlotPool[Array],
    tokens: Int[Array, "rows width"],
    lengths: Int[Array, "rows"],
    admission: AdmissionArrays[Array],
    sampler_state: SamplerState,
) -> tuple[SlotPool[Array], Array | None]:
    """Runs the prefill of rows, writes them into slots and samples the next token of each. A row
    that multiple slots start with is run once.

    Args:
      pool: donated.
      tokens: prefill rows, as many on each ``dp`` rank; 0 rows if all admitted rows are copies of
        other slots.
      lengths: tokens of each.
      admission: source and numbers of the row of each slot.

    Returns:
      The pool and `Prefilled.overflow`: unless that is 0 or None, call this again with the returned
      pool, the same admission and dropless buffers, which overwrites all that was written.
    """
    mesh = decoder.mesh
    rows, pools = over_slots(mesh), pool_specs(mesh, pool)
    sampler_specs = sampler_state_specs(mesh, sampler_state)

    def local(weights, pool, tokens, lengths, admission, sampler_state):
        weights, prefilled, overflow = vary(weights, mesh.axes), None, None
        # Without prefill, all admitted rows are copies of other slots.
        if tokens.shape[0]:
            prefilled = run_prefill_local(decoder, weights, tokens, lengths)
            overflow = prefilled.overflow
        pool = _admit_prefilled_local(
            decoder, sampling, weights, pool, prefilled, tokens, admission, sampler_state
        )
        return pool, overflow

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(decoder.model), pools, rows, rows, rows, sampler_specs),
        out_specs=(pools, PartitionSpec()),
    )(weights, pool, tokens, lengths, admission, sampler_state)


@partial(MeshJit, overlap=False, static_argnums=(0, 1), donate_argnums=3)
def admit_prefilled(
    decoder: Decoder,
    sampling: Sampling,
    rest: Transformer[Array],
    pool: SlotPool[Array],
    prefilled: Prefilled | None,
    tokens: Int[Array, "rows width"],
    admission: AdmissionArrays[Array],
    sampler_state: SamplerState,
) -> SlotPool[Array]:
    """Admits rows whose prefill was run by another function; otherwise as `admit`.

    Args:
      rest: the weights without layers.
      pool: donated.
      prefilled: result of the prefill; None if all admitted rows are copies of other slots.
    """
    mesh = decoder.mesh
    rows, pools = over_slots(mesh), pool_specs(mesh, pool)
    sampler_specs = sampler_state_specs(mesh, sampler_state)
    rests = rest_specs(decoder.model)
    prefills = None if prefilled is None else prefilled_specs(mesh, pools.cache)
    return jax.shard_map(
        partial(_admit_prefilled_local, decoder, sampling),
        mesh=mesh.mesh,
        in_specs=(rests, pools, prefills, rows, rows, sampler_specs),
        out_specs=pools,
    )(rest, pool, prefilled, tokens, admission, sampler_state)


def _admit_prefilled_local(
    decoder: Decoder,
    sampling: Sampling,
    weights: Transformer[Array],
    pool: SlotPool[Array],
    prefilled: Prefilled | None,
    tokens: Array,
    admission: AdmissionArrays[Array],
    sampler_state: SamplerState,
) -> SlotPool[Array]:
    mesh = decoder.mesh
    weights = vary(weights, mesh.axes)
    pool = _write_rows(decoder, pool, prefilled, tokens, admission)
    # The first token is sampled from the last prefill state, every other in a decoding step.
    # The LM head runs for all slots, as the number of admitted rows is not static.
    states = local_shard(pool.states, mesh.sequence)
    logits = logits_of(weights, states, decoder.model)
    admitted = admission.sources >= 0
    rows, continues = append_next_tokens(
        decoder, sampling, logits, pool, pool.rows, admitted, sampler_state
    )
    # A row whose first token ends it is never live.
    return replace(pool, rows=rows, live=pool.live | continues)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def admit_cached(
    decoder: Decoder,
    pool: SlotPool[Array],
    tokens: Int[Array, "slot position"],
    admission: AdmissionArrays[Array],
) -> SlotPool[Array]:
    """Admits rows whose keys and values are in the cache, up to the last token; samples nothing.

    Args:
      pool: without cache, donated.
      tokens: ids of the rows.
      admission: of the rows, each its own source.
    """
    mesh = decoder.mesh
    rows, pools = over_slots(mesh), pool_specs(mesh, pool)

    def local(
        pool: SlotPool[Array], tokens: Array, admission: AdmissionArrays[Array]
    ) -> SlotPool[Array]:
        in_place = Prefilled(pool.cache, pool.states, pool.rows.choices, None)
        pool = _write_rows(decoder, pool, in_place, tokens, admission)
        return replace(pool, live=pool.live | (admission.sources >= 0))

    return jax.shard_map(local, mesh=mesh.mesh, in_specs=(pools, rows, rows), out_specs=pools)(
        pool, tokens, admission
    )


def _write_rows(
    decoder: Decoder,
    pool: SlotPool[Array],
    prefilled: Prefilled | None,
    tokens: Array,
    admission: AdmissionArrays[Array],
) -> SlotPool[Array]:
    """Writes the admitted rows into the pool, not live yet."""
    rows, width = pool.rows, tokens.shape[1]
    source_tokens = tokens
    if prefilled is None:
        prefilled, source_tokens = Prefilled(pool.cache, pool.states, rows.choices), rows.tokens
    admitted = admission.sources >= 0
    source = jnp.maximum(admission.sources, 0)

    def where_admitted(new: Array | float | int, old: Array, row: int = 0) -> Array:
        mask = admitted.reshape([-1 if axis == row % old.ndim else 1 for axis in range(old.ndim)])
        return jnp.where(mask, jnp.asarray(new, old.dtype), old)

    def copy_prefix(old: Array, source_values: Array, axis: int | None, row: int = 0) -> Array:
        """Copies the first positions of an admitted row from its source, or all of it if it has no
        position axis; `old` for other slots."""
        if axis is None:
            return where_admitted(jnp.take(source_values, source, axis=row), old, row)
        # Positions after a row's tokens have arbitrary values: no step reads past a row's length.
        prefix, source_values = (
            jax.lax.slice_in_dim(x, 0, width, axis=axis) for x in (old, source_values)
        )
        new = where_admitted(jnp.take(source_values, source, axis=row), prefix, row)
        return jax.lax.dynamic_update_slice_in_dim(old, new, 0, axis=axis)

    # The source's tokens after the shared prompt do not belong to this row.
    later = admitted[:, None] & (
        jnp.arange(rows.tokens.shape[1])[None] >= admission.lengths[:, None]
    )
    ids = jnp.where(later, decoder.pad_id, copy_prefix(rows.tokens, source_tokens, 1))
    choices = rows.choices
    if choices is not None:
        assert prefilled.choices is not None
        choices = copy_prefix(choices, prefilled.choices, 1)
        none = jnp.asarray(decoder.config.num_experts, choices.dtype)
        if admission.restored is not None and admission.restored.choices is not None:
            # The sampler's expert ids stay on record, whatever this prefill chooses: the
            # log-probability of the token was computed with them.
            before = _pad_positions(admission.restored.choices, choices.shape[1], none)
            choices = jnp.where(admitted[:, None, None, None] & (before != none), before, choices)
        choices = jnp.where(later[..., None, None], none, choices)
    # Scalars, which broadcast, if no row was sampled before.
    starts, records = admission.lengths, (0.0, 0.0, 0)
    if admission.restored is not None:
        starts, restored = admission.restored.starts, admission.restored
        records = tuple(
            _pad_positions(record, ids.shape[1], 0)
            for record in (restored.behaviour_logprobs, restored.old_logprobs, restored.versions)
        )
    behaviour_logprobs, old_logprobs, versions = records
    return SlotPool(
        rows=replace(
            rows,
            lengths=where_admitted(admission.lengths, rows.lengths),
            starts=where_admitted(starts, rows.starts),
            tokens=ids,
            behaviour_logprobs=where_admitted(behaviour_logprobs, rows.behaviour_logprobs),
            old_logprobs=where_admitted(old_logprobs, rows.old_logprobs),
            versions=where_admitted(versions, rows.versions),
            choices=choices,
        ),
        cache=over_columns(partial(copy_prefix, row=ROW), pool.cache, prefilled.cache),
        states=where_admitted(jnp.take(prefilled.states, source, axis=0), pool.states),
        # Even if it was live before: after an overflow the same rows are admitted again.
        live=where_admitted(False, pool.live),
        limits=where_admitted(admission.limits, pool.limits),
        responses=where_admitted(admission.responses, pool.responses),
        prompts=where_admitted(admission.prompts, pool.prompts),
        samples=where_admitted(admission.samples, pool.samples),
    )


def _pad_positions(x: Array, width: int, otherwise: Array | float | int) -> Array:
    """Pads `x` with `otherwise` to `width` positions."""
    padding = [(0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding, constant_values=otherwise)
