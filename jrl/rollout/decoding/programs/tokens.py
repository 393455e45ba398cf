"""Sampling of the next token of each row, and appending it to the row."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.rollout.decoding.programs.slots import Decoder, SlotPool, TokenRows, TopTokens, over_slots
from jrl.rollout.row_sampling import RowSampling, row_keys, sample_rows, top_k_tokens
from jrl.rollout.sampling import Sampling, sample_tokens
from jrl.rollout.threefry import keys_of
from sharding.collectives import join_shards, local_shard, vary
from sharding.folding import FoldedMesh


class SamplerState(NamedTuple):
    """Sampler state of the next tokens, on every device.

    Attributes:
      key: data of the RNG key from which the keys of all tokens are derived.
      version: of the weights.
      entropy: statistics of the step before, for an adaptive temperature.
      rows: per-request sampling parameters, sharded over the slots; None where all rows share one
        `Sampling`.
      greedy: ``[]`` true to take the argmax, see `jrl.rollout.sampling.sample_tokens`.
    """

    key: Array
    version: Array
    entropy: EntropyStatistics[Array] | None = None
    rows: RowSampling[Array] | None = None
    greedy: Array | None = None


class NextTokens(NamedTuple):
    """Next token of each row.

    Attributes:
      tokens: ids.
      behaviour_logprobs, old_logprobs: of them, as in `TokenRows`.
      top_tokens: top-k tokens of the position; None where they are not recorded.
    """

    tokens: Array
    behaviour_logprobs: Array
    old_logprobs: Array
    top_tokens: TopTokens[Array] | None = None


def sampler_state_specs(mesh: FoldedMesh, sampler_state: SamplerState) -> Any:
    """Partition specs of the sampler state."""
    specs = jax.tree.map(lambda _: PartitionSpec(), sampler_state)
    return specs._replace(rows=jax.tree.map(lambda _: over_slots(mesh), sampler_state.rows))


def sample_next_tokens(
    decoder: Decoder,
    sampling: Sampling,
    logits: Array,
    pool: SlotPool[Array],
    rows: TokenRows[Array],
    sampler_state: SamplerState,
) -> NextTokens:
    """Samples the next token of each row with its log-probabilities, the same on every rank of
    ``tp``.

    Args:
      logits: of this rank's shard of the rows.
    """
    # Each rank of tp samples for its shard of the rows, of which it has all logits; then tokens are
    # all-gathered.
    key, axes = keys_of(sampler_state.key), decoder.mesh.sequence

    if sampler_state.rows is not None:
        row_sampling = jax.tree.map(lambda x: local_shard(x, axes), sampler_state.rows)
        samples = local_shard(pool.samples, axes)
        positions = local_shard(rows.lengths - pool.responses, axes)
        keys = row_keys(key, row_sampling.seeds, samples, positions)
        sampled = sample_rows(logits, row_sampling, keys)
        top_tokens = None
        if decoder.top_logprobs:
            top_tokens = top_k_tokens(logits, row_sampling.needs_top_tokens, decoder.top_logprobs)
        return jax.tree.map(lambda x: join_shards(x, axes), NextTokens(*sampled, top_tokens))

    def row_key(prompt: Array, sample: Array, position: Array) -> Array:
        # Derived from ids that do not depend on slot, step or rank.
        sample_key = jax.random.fold_in(jax.random.fold_in(key, prompt), sample)
        return jax.random.fold_in(sample_key, position)

    # Positions count from the start of the response, so that a resumed row uses the same RNG keys
    # as an uninterrupted one.
    keys = jax.vmap(row_key)(
        local_shard(pool.prompts, axes),
        local_shard(pool.samples, axes),
        local_shard(rows.lengths - pool.responses, axes),
    )
    entropy, greedy = vary((sampler_state.entropy, sampler_state.greedy), decoder.mesh.axes)
    token, behaviour, old = sample_tokens(logits, sampling, keys, entropy, greedy)
    return NextTokens(
        join_shards(token, axes), join_shards(behaviour, axes), join_shards(old, axes)
    )


def append_tokens(
    decoder: Decoder,
    pool: SlotPool[Array],
    rows: TokenRows[Array],
    grows: Array,
    sampled: NextTokens,
    version: Array,
) -> tuple[TokenRows[Array], Array]:
    """Appends the sampled tokens to the rows in the mask `grows`; returns the rows, and the mask of
    those that continue."""
    token, behaviour, old, top_tokens = sampled
    # Position of the next token; other rows are not written to.
    positions = rows.lengths
    # Per token, not per row: a row in flight may continue with newer weights.
    versions = jnp.broadcast_to(version.astype(jnp.int32), token.shape)
    longer = replace(
        rows,
        lengths=rows.lengths + grows.astype(jnp.int32),
        tokens=write_column(rows.tokens, grows, positions, token),
        behaviour_logprobs=write_column(rows.behaviour_logprobs, grows, positions, behaviour),
        old_logprobs=write_column(rows.old_logprobs, grows, positions, old),
        versions=write_column(rows.versions, grows, positions, versions),
    )
    if top_tokens is not None:
        recorded = jax.tree.map(
            lambda into, new: write_column(into, grows, positions, new), rows.top_tokens, top_tokens
        )
        longer = replace(longer, top_tokens=recorded)
    # The token that ends a response is part of it.
    continues = grows & (longer.lengths < pool.limits)
    for stop in decoder.stop_ids:
        continues = continues & (token != stop)
    return longer, continues


def write_column(into: Array, where: Array, column: Array, new: Array | None) -> Array:
    """Writes `new` into one column per row of `into`, for the rows in the mask `where`."""
    assert new is not None
    # Past the end, where writes are dropped.
    column = jnp.where(where, column, into.shape[1])
    return into.at[jnp.arange(into.shape[0]), column].set(
        new.astype(into.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )
