"""Scoring passes over packed rows, without computation on padding.

The valid tokens of rows are concatenated into bins of one length (`moe.tokens.packing.
pack_segments`), so that padding costs next to nothing; rows that take no part in a pass are in no
bin. The LM head runs only on the states that predict a token under the mask: prompts, and responses
that only provide context, never reach it. Its outputs are scattered back to ``[batch, time]``, so
that losses do not depend on packing. The reference implementation is `jrl.rollout.scoring`.

Shapes are static: `jrl.trainer.packed.plan`, which assigns rows to bins, computes the sizes that a
device needs.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.rollout.sampling import Sampling
from jrl.rollout.scoring import Choices, Scores, token_scores
from moe.config import ModelConfig
from moe.head import value_of
from moe.tokens.packing import PackedBatch, pack_segments, positions_of, zigzag_of_rows
from moe.weights import Transformer
from sharding.collectives import gather_tokens, join_shards, local_shard, vary
from sharding.folding import FoldedMesh


class PackedSizes(NamedTuple):
    """Static sizes of a packed micro-batch on one data-parallel rank.

    Attributes:
      bins: rows of the packed batch.
      length: of a bin, in tokens.
      max_scored: maximum number of tokens that the LM head scores.
    """

    bins: int
    length: int
    max_scored: int


class BinnedRows(NamedTuple):
    """Rows, and their offsets in the bins.

    Attributes:
      tokens: ``[batch, time]`` ids.
      valid: ``[batch, time]`` true where a token is not padding.
      mask: ``[batch, time]`` the tokens that the LM head scores; each is valid, its row is in a
        bin, and a valid token of its row comes before it.
      starts: ``[batch]`` position of each row's first valid token in the concatenated bins; -1 for
        rows in no bin.
    """

    tokens: Int[Array, "batch time"]
    valid: Bool[Array, "batch time"]
    mask: Bool[Array, "batch time"]
    starts: Int[Array, "batch"]


def pack(
    rows: BinnedRows,
    sizes: PackedSizes,
    config: ModelConfig,
    mesh: FoldedMesh,
    choices: Choices | None = None,
) -> PackedBatch:
    """Packs the rows into bins, the input of the network.

    Args:
      choices: expert ids to replay, see `jrl.rollout.scoring.pack`.
    """
    positions = _bin_positions(rows, sizes)
    # Segment ids count from 1; 0 is padding.
    segment_ids = jnp.broadcast_to(1 + jnp.arange(positions.shape[0])[:, None], positions.shape)

    def to_bins(x: Int[Array, "batch time *_"]) -> Int[Array, "bin length *_"]:
        flat = jnp.zeros_like(x, shape=(sizes.bins * sizes.length, *x.shape[2:]))
        bins = flat.at[positions].set(x, mode="drop")
        return bins.reshape(sizes.bins, sizes.length, *x.shape[2:])

    replay = None if choices is None else jnp.moveaxis(to_bins(choices), 2, 0)
    return pack_segments(
        to_bins(rows.tokens),
        to_bins(segment_ids),
        positions.shape[0],
        mesh,
        config,
        replay,
        positions=to_bins(positions_of(rows.valid)),
    )


def scores_of(
    weights: Transformer[Array],
    x: Float[Array, "local d_model"],
    rows: BinnedRows,
    sizes: PackedSizes,
    config: ModelConfig,
    sampling: Sampling,
    mesh: FoldedMesh,
) -> Scores:
    """Scores of the tokens under the mask, as `jrl.rollout.scoring.scores_of`; all others get 0.

    Communication per device: that of `_gather_predicting_states` and of the head.
    """
    x, index = _gather_predicting_states(x, rows, sizes, config, mesh)
    tokens = rows.tokens.reshape(-1).at[index].get(mode="fill", fill_value=0)
    tokens = local_shard(vary(tokens, mesh.axes), mesh.sequence)
    scores = token_scores(weights, x, tokens, config, sampling, mesh)
    return Scores(*(_scatter_to_rows(values, rows, index, mesh) for values in scores), router=None)


def values_of(
    critic: Transformer[Array],
    x: Float[Array, "local d_model"],
    rows: BinnedRows,
    sizes: PackedSizes,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Float[Array, "batch time"]:
    """Critic values of the state before each token under the mask; all others get 0."""
    x, index = _gather_predicting_states(x, rows, sizes, config, mesh)
    return _scatter_to_rows(value_of(critic, x, config), rows, index, mesh)


def _bin_positions(rows: BinnedRows, sizes: PackedSizes) -> Int[Array, "batch time"]:
    """Position of each token in the concatenated bins; past the end for tokens in no bin."""
    in_bin = rows.valid & (rows.starts >= 0)[:, None]
    position = rows.starts[:, None] + positions_of(rows.valid)
    return jnp.where(in_bin, position, sizes.bins * sizes.length)


def _gather_predicting_states(
    x: Float[Array, "local d_model"],
    rows: BinnedRows,
    sizes: PackedSizes,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "shard d_model"], Int[Array, "scored"]]:
    """Selects the states of a packed batch that predict the tokens under the mask, this rank's
    shard; and returns the flat indices of these tokens in all rows, on every rank.

    Unused entries have an arbitrary state, and an index past the end.

    Communication per device over ``cp x tp``: one `gather_tokens` of the states, ``tokens x d_model
    (n - 1) / n`` elements; backward one `scatter_tokens` as large.
    """
    flat_mask = rows.mask.reshape(-1)
    (index,) = jnp.nonzero(flat_mask, size=sizes.max_scored, fill_value=flat_mask.size)
    before = _bin_positions(rows, sizes).reshape(-1) - 1
    source = jnp.maximum(before.at[index].get(mode="fill", fill_value=0), 0)
    # Bins are sharded over `cp`, in zig-zag order or not: maps a position to the gathered batch.
    zigzag = zigzag_of_rows((sizes.bins, sizes.length), mesh, config)
    (order,) = zigzag.restore(jnp.arange(zigzag.num_tokens, dtype=jnp.int32))
    source = vary(order.reshape(-1)[source], mesh.axes)
    return gather_tokens(x, mesh.sequence)[local_shard(source, mesh.sequence)], index


def _scatter_to_rows(
    values: Float[Array, "shard"], rows: BinnedRows, index: Int[Array, "scored"], mesh: FoldedMesh
) -> Float[Array, "batch time"]:
    """Scatters values of the tokens `index` to their positions in ``[batch, time]``."""
    gathered = join_shards(values, mesh.sequence)
    flat = jnp.zeros_like(gathered, shape=rows.tokens.size)
    return flat.at[index].set(gathered, mode="drop").reshape(rows.tokens.shape)
