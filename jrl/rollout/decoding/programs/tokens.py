"""The next token of each row: drawn, and written where it stands."""

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
from sharding.collectives import join_shards, own_shard, vary
from sharding.folding import FoldedMesh


class Draws(NamedTuple):
    """What the next tokens are drawn with, on every device.

    Attributes:
      key: data of the key from which every token's randomness comes.
      version: of the weights.
      entropy: of the step before, where a temperature adapts.
      rows: how each row is drawn, where each is drawn as its own request asks; over the slots.
      greedy: ``[]`` whether the likeliest tokens are taken, as of `jrl.rollout.sampling.draw`.
    """

    key: Array
    version: Array
    entropy: EntropyStatistics[Array] | None = None
    rows: RowSampling[Array] | None = None
    greedy: Array | None = None


class Drawn(NamedTuple):
    """The next token of each row.

    Attributes:
      tokens: ids.
      behaviour_logprobs, old_logprobs: of them, as in `Rows`.
      likeliest: what else might have come; None where it is not kept.
    """

    tokens: Array
    behaviour_logprobs: Array
    old_logprobs: Array
    likeliest: Likeliest[Array] | None = None


def draws_specs(mesh: FoldedMesh, draws: Draws) -> Any:
    """Where what is drawn with lives."""
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
    """The next token of each row and its log-probabilities, the same on every rank of ``tp``.

    Args:
      logits: of this rank's shard of the rows.
    """
    # Each rank of tp draws for its share of the rows, of which it has whole logits; then all of
    # them have every row's token.
    key, axes = keys_of(draws.key), decoder.mesh.sequence

    if draws.rows is not None:
        own = jax.tree.map(lambda x: own_shard(x, axes), draws.rows)
        numbers = (own_shard(x, axes) for x in (pool.samples, rows.lengths - pool.responses))
        drawn = draw_rows(logits, own, row_keys(key, own.seeds, *numbers))
        likeliest = None
        if decoder.top_logprobs:
            likeliest = likeliest_of(logits, own.wants_likeliest, decoder.top_logprobs)
        return jax.tree.map(lambda x: join_shards(x, axes), Drawn(*drawn, likeliest))

    def own_key(prompt: Array, sample: Array, place: Array) -> Array:
        # Of numbers that a row keeps wherever it is decoded: no slot, no step, no rank.
        of_row = jax.random.fold_in(jax.random.fold_in(key, prompt), sample)
        return jax.random.fold_in(of_row, place)

    # Counted from where the response begins, so that a row that goes on draws as if it had never
    # stopped.
    numbers = pool.prompts, pool.samples, rows.lengths - pool.responses
    keys = jax.vmap(own_key)(*(own_shard(x, axes) for x in numbers))
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
    """The rows, of which some grow by what was drawn, and which of those go on."""
    token, behaviour, old, likeliest = drawn
    # Where the next token stands; rows that do not grow are written nothing.
    place = rows.lengths
    # Of tokens, not of rows: one in flight goes on with other weights than it began with.
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
    """`into` with `new` in a column of its own for each row, of some rows."""
    assert new is not None
    # Past the end, where writing does nothing.
    column = jnp.where(where, column, into.shape[1])
    return into.at[jnp.arange(into.shape[0]), column].set(
        new.astype(into.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )
