"""The load within each sequence: what the load-balancing loss of a sequence compares with.

Devices of ``cp`` and ``tp`` hold parts of a sequence. What they tell each other of it are sums, one
for each expert, never what a token chose.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.collectives import all_sum, own_shard
from sharding.folding import FoldedMesh


class Sequences(NamedTuple):
    """Which tokens make a sequence.

    Attributes:
      pieces: ``[token]`` the piece of a sequence that each token stands in, from 0; padding stands
        in any.
      num_pieces: how many there are.
      fractions: from assignments ``[piece, route]`` to each expert's fraction of those in the
        sequence of the piece (the mean over sequences where it stands in several).
    """

    pieces: Array
    num_pieces: int
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

    Communication per device and layer: one `all_sum` over ``cp x tp`` of ``[piece, route]``
    numbers.

    Args:
      counts: assignments of each of these tokens to each expert; 0 for padding.
      sequences: of all tokens of the sequence-parallel group.
    """
    own = own_shard(sequences.pieces, mesh.sequence)
    # Whole numbers: no order of the sum changes a bit.
    sent = jax.ops.segment_sum(counts, own, sequences.num_pieces)
    return sequences.fractions(all_sum(sent, mesh.sequence))[own]
