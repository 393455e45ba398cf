"""Load fractions within each sequence, for the sequence-wise load-balancing loss.

Devices of ``cp`` and ``tp`` hold parts of a sequence. They exchange sums over tokens, one number
for each expert, never the expert ids of tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.collectives import all_sum, local_shard
from sharding.folding import FoldedMesh


class Sequences(NamedTuple):
    """Grouping of tokens into sequences.

    Attributes:
      segments: ``[token]`` index of the segment of a sequence that contains each token, from 0;
        arbitrary for padding.
      num_segments: number of segments.
      fractions: function from assignments ``[segment, route]`` to each expert's fraction of those
        in the sequence of the segment (the mean over sequences if more than one contains it).
    """

    segments: Array
    num_segments: int
    fractions: Callable[[Array], Array]


def load_fraction(sent: Float[Array, "*sets route"]) -> Float[Array, "*sets route"]:
    """The fraction of a set's assignments that each expert got; sums to 1 over experts.

    A set without assignments has fractions of 0.
    """
    return sent / jnp.maximum(jnp.sum(sent, axis=-1, keepdims=True), 1.0)


def sequence_load_fractions(
    counts: Float[Array, "local route"], sequences: Sequences, mesh: FoldedMesh
) -> Float[Array, "local route"]:
    """The load fractions of each token's sequence, of this rank's shard of the tokens.

    Communication per device and layer: one `all_sum` over ``cp x tp`` of ``[segment, route]``
    numbers.

    Args:
      counts: assignments of each of these tokens to each expert; 0 for padding.
      sequences: sequences of all tokens of the sequence-parallel group.
    """
    segment_ids = local_shard(sequences.segments, mesh.sequence)
    # Integers: the order of the sum does not change the result.
    sent = jax.ops.segment_sum(counts, segment_ids, sequences.num_segments)
    return sequences.fractions(all_sum(sent, mesh.sequence))[segment_ids]
