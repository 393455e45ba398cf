"""Extension of rows in the KV cache: runs the tokens behind those that the cache has."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jrl.processes.agreement import to_devices
from jrl.rollout.decoding.mesh_backend import (
    MeshBackend,
    UnstackedPolicy,
    layers_with_experts,
    policy_specs,
)
from jrl.rollout.decoding.prefill import AdmissionArrays, admit_cached
from jrl.rollout.decoding.scheduling.prefix_cache import Extension
from jrl.rollout.decoding.slots import (
    Decoder,
    SlotPool,
    cache_specs,
    over_slots,
    without_cache,
)
from moe.cache import ROW, Cache, StepTokens
from moe.decoding import decode_step
from sharding.collectives import vary
from sharding.sharded_jit import MeshJit

CHUNK = 64
"""Tokens of a row that one program runs."""


def admit_extensions(
    backend: MeshBackend,
    pool: SlotPool[Array],
    extensions: Sequence[Extension],
    tokens: Array,
    admission: AdmissionArrays[Array],
) -> SlotPool[Array]:
    """Admits rows of which the cache has the first tokens, in their order: it runs all others but
    the last, which the next step of decoding runs.

    Args:
      pool: donated.
      tokens: ``[slot, position]`` ids of the rows.
      admission: of the rows, each its own source.
    """
    decoder, sharding = backend.decoder, backend.slot_sharding
    ranks, unit = decoder.mesh.size(decoder.mesh.dp), decoder.mesh.size(decoder.mesh.tp)
    per_rank, cache = pool.live.shape[0] // ranks, pool.cache
    width = -(-CHUNK // unit) * unit
    for extension in extensions:
        rank, slot = divmod(extension.slot, per_rank)
        # Other ranks run padding, in a slot where nothing is written.
        slots, sources = np.zeros(ranks, np.int32), np.zeros(ranks, np.int32)
        slots[rank], sources[rank] = slot, extension.source % per_rank
        if extension.source != extension.slot:
            cache = copy_row(decoder, cache, *to_devices((sources, slots), sharding))
        for inputs in _chunks(extension, rank, ranks, width):
            inputs, at = to_devices((inputs, slots), sharding)
            cache = extend(decoder, backend.step_policy, cache, inputs, at)
    return replace(admit_cached(decoder, without_cache(pool), tokens, admission), cache=cache)


def _chunks(extension: Extension, rank: int, ranks: int, width: int) -> Iterator[StepTokens]:
    """Tokens that an extension runs, `width` at a time."""
    ids = extension.request.ids[:-1]
    for first in range(extension.num_cached, len(ids), width):
        tokens, positions = np.zeros((2, ranks, width), np.int32)
        live, count = np.zeros((ranks, width), bool), min(width, len(ids) - first)
        tokens[rank, :count] = ids[first : first + count]
        positions[rank] = first + np.arange(width)
        live[rank, :count] = True
        arrays: Any = [x.reshape(-1) for x in (tokens, positions, live)]
        yield StepTokens(*arrays)


@partial(MeshJit, overlap=False, static_argnums=0, donate_argnums=2)
def extend(
    decoder: Decoder,
    policy: UnstackedPolicy[Array],
    cache: Cache[Array],
    inputs: StepTokens,
    slots: Int[Array, "rank"],
) -> Cache[Array]:
    """Runs further tokens of one row of each rank, and writes their keys and values.

    Args:
      cache: with the keys and values of the tokens before; donated.
      inputs: ``[rank x token]`` in the order of their positions; tokens that are not live are
        padding.
      slots: slot of the row, counted from the rank's first.
    """
    mesh, buffers = decoder.mesh, cache_specs(decoder)
    rows: Any = over_slots(mesh)

    def local(
        policy: UnstackedPolicy[Array], cache: Cache[Array], inputs: StepTokens, slots: Array
    ) -> Cache[Array]:
        policy, cache = vary((policy, cache), mesh.axes)
        inputs = inputs._replace(row=slots[0])
        layers = layers_with_experts(policy)
        _, cache, _ = decode_step(layers, policy.rest, cache, inputs, decoder.model)
        return cache

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(policy_specs(decoder), buffers, StepTokens(rows, rows, rows), rows),
        out_specs=buffers,
    )(policy, cache, inputs, slots)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_row(
    decoder: Decoder, cache: Cache[Array], source: Int[Array, "rank"], target: Int[Array, "rank"]
) -> Cache[Array]:
    """Copies the keys and values of a slot of each rank to another, counted from the rank's first;
    the cache is donated."""
    mesh, buffers = decoder.mesh, cache_specs(decoder)
    rows = over_slots(mesh)

    def local(cache: Cache[Array], source: Array, target: Array) -> Cache[Array]:
        def copy(buffer: Array) -> Array:
            axis = buffer.ndim + ROW
            row = jax.lax.dynamic_slice_in_dim(buffer, source[0], 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(buffer, row, target[0], axis)

        return jax.tree.map(copy, cache)

    return jax.shard_map(local, mesh=mesh.mesh, in_specs=(buffers, rows, rows), out_specs=buffers)(
        cache, source, target
    )
