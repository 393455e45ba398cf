"""Compiled functions of a micro-batch of slots whose layers are run elsewhere: the input tokens of
a step, and the sampling of the next ones."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.rollout.decoding.programs.slots import Decoder, Pool, over_slots, pool_specs
from jrl.rollout.decoding.programs.tokens import Draws, appended, drawn_tokens, draws_specs, written
from jrl.rollout.sampling import Sampling
from sharding.collectives import all_sum, vary


@partial(jax.jit, static_argnums=(0, 1))
def standing(
    decoder: Decoder, parts: int, pool: Pool[Array], number: Array
) -> tuple[Array, Array, Array]:
    """Last token of each row of a micro-batch, which has not been run yet, its position, and the
    mask of live rows.

    Args:
      pool: without its cache.
      number: index of the micro-batch, of `parts`.
    """
    mesh = decoder.mesh

    def local(pool: Pool[Array], number: Array) -> tuple[Array, Array, Array]:
        tokens, lengths, live = (
            _part(x, parts, number) for x in (pool.rows.tokens, pool.rows.lengths, pool.live)
        )
        last = jnp.maximum(lengths - 1, 0)
        return jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0], last, live

    rows = over_slots(mesh)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(pool_specs(mesh, pool), PartitionSpec()),
        out_specs=(rows, rows, rows),
    )(pool, number)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def counted(
    decoder: Decoder, parts: int, loads: Array, live: Array, choices: Array, number: Array
) -> Array:
    """Adds the tokens of a micro-batch to the load of each expert.

    Args:
      loads: ``[layer, expert]`` so far; donated.
      live: of all rows.
      choices: ``[row, layer, k]`` expert ids of the micro-batch.
      number: index of the micro-batch, of `parts`.
    """
    mesh = decoder.mesh

    def local(loads: Array, live: Array, choices: Array, number: Array) -> Array:
        layers = jnp.arange(loads.shape[0])[None, :, None]
        # Rows that are not live are computed too, but are not counted.
        run = jnp.broadcast_to(_part(live, parts, number)[:, None, None], choices.shape)
        own = jnp.zeros_like(loads).at[layers, choices].add(run.astype(loads.dtype))
        return loads + all_sum(vary(own, mesh.except_sequence), mesh.except_sequence)

    whole, rows = PartitionSpec(), over_slots(mesh)
    return jax.shard_map(
        local, mesh=mesh.mesh, in_specs=(whole, rows, rows, whole), out_specs=whole
    )(loads, live, choices, number)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def sample_part(
    decoder: Decoder,
    sampling: Sampling,
    parts: int,
    pool: Pool[Array],
    logits: Array,
    choices: Array | None,
    draws: Draws,
    number: Array,
) -> tuple[Pool[Array], Array, Array]:
    """Samples the next token of the live rows of a micro-batch, as
    `jrl.rollout.decoding.programs.advance` does for all rows.

    Args:
      pool: without its cache; donated.
      logits: ``[row, vocab]`` over all devices.
      choices: ``[row, layer, k]`` expert ids of the token that was run.
      number: index of the micro-batch, of `parts`.

    Returns:
      The pool, the number of rows that got a token, and the number of those still live.
    """
    mesh = decoder.mesh

    def local(
        pool: Pool[Array], logits: Array, choices: Array | None, draws: Draws, number: Array
    ) -> tuple[Pool[Array], Array, Array]:
        own = jax.tree.map(lambda x: _part(x, parts, number), pool)
        rows, live = own.rows, own.live
        if rows.choices is not None:
            last = jnp.maximum(rows.lengths - 1, 0)
            rows = replace(rows, choices=written(rows.choices, live, last, choices))
        # Per-request sampling parameters, if there are any, of this micro-batch.
        of_rows = jax.tree.map(lambda x: _part(x, parts, number), draws.rows)
        drawn = drawn_tokens(decoder, sampling, logits, own, rows, draws._replace(rows=of_rows))
        rows, going = appended(decoder, own, rows, live, drawn, draws.version)
        # Micro-batch i is the i-th part of each device's slots.
        first = number * live.shape[0]

        def back(whole: Array, part: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(whole, part, first, axis=0)

        whole = replace(pool, rows=jax.tree.map(back, pool.rows, rows), live=back(pool.live, going))

        def count(of: Array) -> Array:
            return all_sum(jnp.sum(of.astype(jnp.int32)), mesh.except_sequence)

        return vary(whole, mesh.except_sequence), count(live), count(going)

    whole, rows = PartitionSpec(), over_slots(mesh)
    pools = pool_specs(mesh, pool)
    chosen = None if choices is None else rows
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(pools, PartitionSpec(mesh.axes), chosen, draws_specs(mesh, draws), whole),
        out_specs=(pools, whole, whole),
    )(pool, logits, choices, draws, number)


def _part(x: Array, parts: int, number: Array) -> Array:
    """Slice of the rows of a micro-batch."""
    size = x.shape[0] // parts
    return lax.dynamic_slice_in_dim(x, number * size, size)
