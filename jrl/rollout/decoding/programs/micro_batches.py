"""Compiled functions of a micro-batch of slots whose layers are run elsewhere: the input tokens of
a step, and the sampling of the next ones."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.rollout.decoding.programs.slots import Decoder, SlotPool, over_slots, pool_specs
from jrl.rollout.decoding.programs.tokens import (
    SamplerState,
    append_tokens,
    sample_next_tokens,
    sampler_state_specs,
    write_column,
)
from jrl.rollout.sampling import Sampling
from sharding.collectives import all_sum, vary


@partial(jax.jit, static_argnums=(0, 1))
def read_step_inputs(
    decoder: Decoder, num_micro_batches: int, pool: SlotPool[Array], index: Array
) -> tuple[Array, Array, Array]:
    """Last token of each row of a micro-batch, which has not been run yet, its position, and the
    mask of live rows.

    Args:
      pool: without its cache.
      index: index of the micro-batch, of `num_micro_batches`.
    """
    mesh = decoder.mesh

    def local(pool: SlotPool[Array], index: Array) -> tuple[Array, Array, Array]:
        tokens, lengths, live = (
            _slice_micro_batch(x, num_micro_batches, index)
            for x in (pool.rows.tokens, pool.rows.lengths, pool.live)
        )
        last = jnp.maximum(lengths - 1, 0)
        return jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0], last, live

    rows = over_slots(mesh)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(pool_specs(mesh, pool), PartitionSpec()),
        out_specs=(rows, rows, rows),
    )(pool, index)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def add_expert_loads(
    decoder: Decoder,
    num_micro_batches: int,
    loads: Array,
    live: Array,
    choices: Array,
    index: Array,
) -> Array:
    """Adds the tokens of a micro-batch to the load of each expert.

    Args:
      loads: ``[layer, expert]`` so far; donated.
      live: of all rows.
      choices: ``[row, layer, k]`` expert ids of the micro-batch.
      index: index of the micro-batch, of `num_micro_batches`.
    """
    mesh = decoder.mesh

    def local(loads: Array, live: Array, choices: Array, index: Array) -> Array:
        layers = jnp.arange(loads.shape[0])[None, :, None]
        # Rows that are not live are computed too, but are not counted.
        counts = jnp.broadcast_to(
            _slice_micro_batch(live, num_micro_batches, index)[:, None, None], choices.shape
        )
        local_loads = jnp.zeros_like(loads).at[layers, choices].add(counts.astype(loads.dtype))
        return loads + all_sum(vary(local_loads, mesh.except_sequence), mesh.except_sequence)

    replicated, rows = PartitionSpec(), over_slots(mesh)
    return jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(replicated, rows, rows, replicated), out_specs=replicated
    )(loads, live, choices, index)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def sample_micro_batch(
    decoder: Decoder,
    sampling: Sampling,
    num_micro_batches: int,
    pool: SlotPool[Array],
    logits: Array,
    choices: Array | None,
    sampler_state: SamplerState,
    index: Array,
) -> tuple[SlotPool[Array], Array, Array]:
    """Samples the next token of the live rows of a micro-batch, as
    `jrl.rollout.decoding.programs.advance` does for all rows.

    Args:
      pool: without its cache; donated.
      logits: ``[row, vocab]`` over all devices.
      choices: ``[row, layer, k]`` expert ids of the token that was run.
      index: index of the micro-batch, of `num_micro_batches`.

    Returns:
      The pool, the number of rows that got a token, and the number of those still live.
    """
    mesh = decoder.mesh

    def local(
        pool: SlotPool[Array],
        logits: Array,
        choices: Array | None,
        sampler_state: SamplerState,
        index: Array,
    ) -> tuple[SlotPool[Array], Array, Array]:
        micro_batch = jax.tree.map(lambda x: _slice_micro_batch(x, num_micro_batches, index), pool)
        rows, live = micro_batch.rows, micro_batch.live
        if rows.choices is not None:
            last = jnp.maximum(rows.lengths - 1, 0)
            rows = replace(rows, choices=write_column(rows.choices, live, last, choices))
        # Per-request sampling parameters, if there are any, of this micro-batch.
        row_sampling = jax.tree.map(
            lambda x: _slice_micro_batch(x, num_micro_batches, index), sampler_state.rows
        )
        sampled = sample_next_tokens(
            decoder, sampling, logits, micro_batch, rows, sampler_state._replace(rows=row_sampling)
        )
        rows, continues = append_tokens(
            decoder, micro_batch, rows, live, sampled, sampler_state.version
        )
        # Micro-batch i is the i-th part of each device's slots.
        first = index * live.shape[0]

        def write_back(full: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(full, new, first, axis=0)

        updated = replace(
            pool,
            rows=jax.tree.map(write_back, pool.rows, rows),
            live=write_back(pool.live, continues),
        )

        def count(mask: Array) -> Array:
            return all_sum(jnp.sum(mask.astype(jnp.int32)), mesh.except_sequence)

        return vary(updated, mesh.except_sequence), count(live), count(continues)

    replicated, rows = PartitionSpec(), over_slots(mesh)
    pools = pool_specs(mesh, pool)
    choices_spec = None if choices is None else rows
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(
            pools,
            PartitionSpec(mesh.axes),
            choices_spec,
            sampler_state_specs(mesh, sampler_state),
            replicated,
        ),
        out_specs=(pools, replicated, replicated),
    )(pool, logits, choices, sampler_state, index)


def _slice_micro_batch(x: Array, num_micro_batches: int, index: Array) -> Array:
    """Slice of the rows of a micro-batch."""
    size = x.shape[0] // num_micro_batches
    return lax.dynamic_slice_in_dim(x, index * size, size)
