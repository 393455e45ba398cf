"""Sampling of the next token of each row, and appending it to the row."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.rollout.decoding.programs.slots import Decoder, Likeliest, Pool, Rows, over_slots
from jrl.rollout.row_sampling import RowSampling, draw_rows, likeliest_of, row_keys
from jrl.rollout.sampling import Sampling, draw
from jrl.rollout.threefry import keys_of
from sharding.collectives import join_shards, local_shard, vary
from sharding.folding import FoldedMesh


class Draws(NamedTuple):
    """Sampler state of the next tokens, on every device.

    Attributes:
      key: data of the RNG key from which the keys of all tokens are derived.
      version: of the weights.
      entropy: statistics of the step before, for an adaptive temperature.
      rows: per-request sampling parameters, sharded over the slots; None where all rows share one
        `Sampling`.
      greedy: ``[]`` true to take the argmax, see `jrl.rollout.sampling.draw`.
    """

    key: Array
    version: Array
    entropy: EntropyStatistics[Array] | None = None
    rows: RowSampling[Array] | None = None
    greedy: Array | None = None


class Drawn(NamedTuple):
    """Next token of each row.

    Attributes:
      tokens: ids.
      behaviour_logprobs, old_logprobs: of them, as in `Rows`.
      likeliest: top-k tokens of the position; None where they are not recorded.
    """

    tokens: Array
    behaviour_logprobs: Array
    old_logprobs: Array
    likeliest: Likeliest[Array] | None = None


def draws_specs(mesh: FoldedMesh, draws: Draws) -> Any:
    """Partition specs of the sampler state."""
    specs = jax.tree.map(lambda _: PartitionSpec(), draws)
    return specs._replace(rows=jax.tree.map(lambda _: over_slots(mesh), draws.rows))


def drawn_tokens(
    decoder: Decoder,
    sampling: Sampling,
    logits: Array,
    pool: Pool[Array],
    rows: Rows[Array],
    draws: Draws,
) -> Drawn:
    """Samples the next token of each row with its log-probabilities, the same on every rank of
    ``tp``.

    Args:
      logits: of this rank's shard of the rows.
    """
    # Each rank of tp samples for its shard of the rows, of which it has all logits; then tokens are
    # all-gathered.
    key, axes = keys_of(draws.key), decoder.mesh.sequence

    if draws.rows is not None:
        own = jax.tree.map(lambda x: local_shard(x, axes), draws.rows)
        numbers = (local_shard(x, axes) for x in (pool.samples, rows.lengths - pool.responses))
        drawn = draw_rows(logits, own, row_keys(key, own.seeds, *numbers))
        likeliest = None
        if decoder.top_logprobs:
            likeliest = likeliest_of(logits, own.wants_likeliest, decoder.top_logprobs)
        return jax.tree.map(lambda x: join_shards(x, axes), Drawn(*drawn, likeliest))

    def own_key(prompt: Array, sample: Array, place: Array) -> Array:
        # Derived from ids that do not depend on slot, step or rank.
        of_row = jax.random.fold_in(jax.random.fold_in(key, prompt), sample)
        return jax.random.fold_in(of_row, place)

    # Positions count from the start of the response, so that a resumed row uses the same RNG keys
    # as an uninterrupted one.
    numbers = pool.prompts, pool.samples, rows.lengths - pool.responses
    keys = jax.vmap(own_key)(*(local_shard(x, axes) for x in numbers))
    entropy, greedy = vary((draws.entropy, draws.greedy), decoder.mesh.axes)
    token, behaviour, old = draw(logits, sampling, keys, entropy, greedy)
    return Drawn(join_shards(token, axes), join_shards(behaviour, axes), join_shards(old, axes))


def appended(
    decoder: Decoder,
    pool: Pool[Array],
    rows: Rows[Array],
    grows: Array,
    drawn: Drawn,
    version: Array,
) -> tuple[Rows[Array], Array]:
    """Appends the sampled tokens to the rows in the mask `grows`; returns the rows, and the mask of
    those that continue."""
    token, behaviour, old, likeliest = drawn
    # Position of the next token; other rows are not written to.
    place = rows.lengths
    # Per token, not per row: a row in flight may continue with newer weights.
    versions = jnp.broadcast_to(version.astype(jnp.int32), token.shape)
    longer = replace(
        rows,
        lengths=rows.lengths + grows.astype(jnp.int32),
        tokens=written(rows.tokens, grows, place, token),
        behaviour_logprobs=written(rows.behaviour_logprobs, grows, place, behaviour),
        old_logprobs=written(rows.old_logprobs, grows, place, old),
        versions=written(rows.versions, grows, place, versions),
    )
    if likeliest is not None:
        kept = jax.tree.map(
            lambda into, new: written(into, grows, place, new), rows.likeliest, likeliest
        )
        longer = replace(longer, likeliest=kept)
    # The token that ends a response is part of it.
    going = grows & (longer.lengths < pool.limits)
    for stop in decoder.stop_ids:
        going = going & (token != stop)
    return longer, going


def written(into: Array, where: Array, column: Array, new: Array | None) -> Array:
    """Writes `new` into one column per row of `into`, for the rows in the mask `where`."""
    assert new is not None
    # Past the end, where writes are dropped.
    column = jnp.where(where, column, into.shape[1])
    return into.at[jnp.arange(into.shape[0]), column].set(
        new.astype(into.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )
