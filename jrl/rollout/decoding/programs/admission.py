"""Admission of rows to slots: prefill, and sampling of the first token."""

from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jrl.rollout.decoding.programs.slots import (
    Decoder,
    Pool,
    Rows,
    over_slots,
    pool_specs,
    prefilled_local,
)
from jrl.rollout.decoding.programs.tokens import Draws, appended, drawn_tokens, draws_specs
from jrl.rollout.sampling import Sampling
from moe.cache.buffers import ROW, over_columns
from moe.decoding import Prefilled
from moe.disaggregated.weights import rest_specs
from moe.head import logits_of
from moe.placement import specs
from moe.weights import Transformer
from sharding.collectives import local_shard, vary

Leaf = TypeVar("Leaf")


@struct.dataclass
class Carried(Generic[Leaf]):
    """Restored state of admitted rows that were sampled before, as in `Rows`.

    Attributes:
      starts: ``[slot]``.
      behaviour_logprobs, old_logprobs, versions: ``[slot, width]``.
      choices: expert ids ``[slot, width, layer, k]``, or None; `num_experts` takes those of the
        row's prefill.
    """

    starts: Leaf
    behaviour_logprobs: Leaf
    old_logprobs: Leaf
    versions: Leaf
    choices: Leaf | None


@struct.dataclass
class Arrivals(Generic[Leaf]):
    """Admitted rows, an entry per slot.

    Attributes:
      sources: ``[slot]`` source of the row's initial KV cache: the index of one of the prefill rows
        of the slot's rank or, without prefill, of another of its slots, whose row starts with the
        same tokens; -1 where no row is admitted.
      lengths: ``[slot]`` tokens of prompt and response so far.
      limits, responses, prompts, samples: as in `Pool`.
      carried: restored state; None where no row was sampled before.
    """

    sources: Leaf
    lengths: Leaf
    limits: Leaf
    responses: Leaf
    prompts: Leaf
    samples: Leaf
    carried: Carried[Leaf] | None = None


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def admit(
    decoder: Decoder,
    sampling: Sampling,
    weights: Transformer[Array],
    pool: Pool[Array],
    tokens: Int[Array, "rows width"],
    lengths: Int[Array, "rows"],
    arrivals: Arrivals[Array],
    draws: Draws,
) -> tuple[Pool[Array], Array | None]:
    """Runs the prefill of rows, writes them into slots and samples the next token of each. A row
    that multiple slots start with is run once.

    Args:
      pool: donated.
      tokens: prefill rows, as many on each ``dp`` rank; 0 rows where all admitted rows are copies
        of other slots.
      lengths: tokens of each.
      arrivals: source and numbers of the row of each slot.

    Returns:
      The pool and `Prefilled.overflow`: unless that is 0 or None, call this again with the returned
      pool, the same arrivals and dropless buffers, which overwrites all that was written.
    """
    mesh = decoder.mesh
    rows, pools, drawn = over_slots(mesh), pool_specs(mesh, pool), draws_specs(mesh, draws)

    def local(weights, pool, tokens, lengths, arrivals, draws):
        weights, known, overflow = vary(weights, mesh.axes), None, None
        # Without prefill, all admitted rows are copies of other slots.
        if tokens.shape[0]:
            known = prefilled_local(decoder, weights, tokens, lengths)
            overflow = known.overflow
        given = weights, pool, known, tokens, arrivals, draws
        return _admit_known_local(decoder, sampling, *given), overflow

    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(decoder.config, mesh), pools, rows, rows, rows, drawn),
        out_specs=(pools, PartitionSpec()),
    )(weights, pool, tokens, lengths, arrivals, draws)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def admit_known(
    decoder: Decoder,
    sampling: Sampling,
    rest: Transformer[Array],
    pool: Pool[Array],
    known: Prefilled | None,
    tokens: Int[Array, "rows width"],
    arrivals: Arrivals[Array],
    draws: Draws,
) -> Pool[Array]:
    """Admits rows whose prefill was run by another function; otherwise as `admit`.

    Args:
      rest: the weights without layers.
      pool: donated.
      known: result of the prefill; None where all admitted rows are copies of other slots.
    """
    mesh = decoder.mesh
    rows, pools, drawn = over_slots(mesh), pool_specs(mesh, pool), draws_specs(mesh, draws)
    ran: Any = None
    if known is not None:
        chosen: Any = None if known.choices is None else rows
        spread: Any = rows
        heads: Any = pools.cache
        ran = Prefilled(heads, spread, chosen)
    local = jax.shard_map(
        partial(_admit_known_local, decoder, sampling),
        mesh=mesh.mesh,
        in_specs=(rest_specs(decoder.config, mesh), pools, ran, rows, rows, drawn),
        out_specs=pools,
    )
    return local(rest, pool, known, tokens, arrivals, draws)


def _admit_known_local(
    decoder: Decoder,
    sampling: Sampling,
    weights: Transformer[Array],
    pool: Pool[Array],
    known: Prefilled | None,
    tokens: Array,
    arrivals: Arrivals[Array],
    draws: Draws,
) -> Pool[Array]:
    mesh = decoder.mesh
    weights = vary(weights, mesh.axes)
    pool = _placed(decoder, pool, known, tokens, arrivals)
    # The first token is sampled from the last prefill state, every other in a decoding step.
    # The LM head runs for all slots, as the number of admitted rows is not static.
    states = local_shard(pool.states, mesh.sequence)
    logits = logits_of(weights, states, decoder.config, mesh)
    drawn = drawn_tokens(decoder, sampling, logits, pool, pool.rows, draws)
    rows, going = appended(decoder, pool, pool.rows, arrivals.sources >= 0, drawn, draws.version)
    # A row whose first token ends it is never live.
    return replace(pool, rows=rows, live=pool.live | going)


def _placed(
    decoder: Decoder,
    pool: Pool[Array],
    known: Prefilled | None,
    tokens: Array,
    arrivals: Arrivals[Array],
) -> Pool[Array]:
    """Writes the admitted rows into the pool, not live yet."""
    rows, width = pool.rows, tokens.shape[1]
    known_tokens = tokens
    if known is None:
        known, known_tokens = Prefilled(pool.cache, pool.states, rows.choices), rows.tokens
    arrives = arrivals.sources >= 0
    source = jnp.maximum(arrivals.sources, 0)

    def where_arriving(new: Array | float | int, own: Array, row: int = 0) -> Array:
        there = arrives.reshape([-1 if axis == row % own.ndim else 1 for axis in range(own.ndim)])
        return jnp.where(there, jnp.asarray(new, own.dtype), own)

    def begun(own: Array, known: Array, axis: int | None, row: int = 0) -> Array:
        """Copies the first positions of an admitted row from its source, or all of it without a
        position axis; `own` for other slots."""
        if axis is None:
            return where_arriving(jnp.take(known, source, axis=row), own, row)
        # Positions after a row's tokens have arbitrary values: no step reads past a row's length.
        there, known = (jax.lax.slice_in_dim(x, 0, width, axis=axis) for x in (own, known))
        new = where_arriving(jnp.take(known, source, axis=row), there, row)
        return jax.lax.dynamic_update_slice_in_dim(own, new, 0, axis=axis)

    # The source's tokens after the shared prompt do not belong to this row.
    later = arrives[:, None] & (jnp.arange(rows.tokens.shape[1])[None] >= arrivals.lengths[:, None])
    ids = jnp.where(later, decoder.pad_id, begun(rows.tokens, known_tokens, 1))
    choices = rows.choices
    if choices is not None:
        assert known.choices is not None
        choices = begun(choices, known.choices, 1)
        none = jnp.asarray(decoder.config.num_experts, choices.dtype)
        if arrivals.carried is not None and arrivals.carried.choices is not None:
            # The sampler's expert ids stay on record, whatever this prefill chooses: the
            # log-probability of the token was computed with them.
            before = _widened(arrivals.carried.choices, choices.shape[1], none)
            choices = jnp.where(arrives[:, None, None, None] & (before != none), before, choices)
        choices = jnp.where(later[..., None, None], none, choices)
    # Scalars, which broadcast, where no row was sampled before.
    starts, columns = arrivals.lengths, (0.0, 0.0, 0)
    if arrivals.carried is not None:
        starts, own = arrivals.carried.starts, arrivals.carried
        given = own.behaviour_logprobs, own.old_logprobs, own.versions
        columns = tuple(_widened(column, ids.shape[1], 0) for column in given)
    behaviour_logprobs, old_logprobs, versions = columns
    return Pool(
        rows=Rows(
            lengths=where_arriving(arrivals.lengths, rows.lengths),
            starts=where_arriving(starts, rows.starts),
            tokens=ids,
            behaviour_logprobs=where_arriving(behaviour_logprobs, rows.behaviour_logprobs),
            old_logprobs=where_arriving(old_logprobs, rows.old_logprobs),
            versions=where_arriving(versions, rows.versions),
            choices=choices,
            likeliest=rows.likeliest,
        ),
        cache=over_columns(partial(begun, row=ROW), pool.cache, known.cache),
        states=where_arriving(jnp.take(known.states, source, axis=0), pool.states),
        # Also where it was live before: after an overflow the same rows are admitted again.
        live=where_arriving(False, pool.live),
        limits=where_arriving(arrivals.limits, pool.limits),
        responses=where_arriving(arrivals.responses, pool.responses),
        prompts=where_arriving(arrivals.prompts, pool.prompts),
        samples=where_arriving(arrivals.samples, pool.samples),
    )


def _widened(x: Array, width: int, otherwise: Array | float | int) -> Array:
    """Pads `x` with `otherwise` to `width` positions."""
    room = [(0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, room, constant_values=otherwise)
