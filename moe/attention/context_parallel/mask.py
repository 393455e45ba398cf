"""Which keys a query may attend to: earlier or equal columns of its own segment."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from moe.tokens.zigzag import Order

Query = Float[Array, "token heads head_dim"]
Key = Float[Array, "token kv_heads head_dim"]
Value = Float[Array, "token kv_heads value_dim"]
Read = Float[Array, "token heads value_dim"]
Sections = tuple[Array, ...]


class Reading(NamedTuple):
    """Who may read whom in a stream: earlier or equal columns of the own segment.

    Attributes:
      order: of the stream.
      column: ``[token]`` place in the row.
      segment: ``[token]`` id of the sequence within the row; 0 for padding, which nobody reads.
      sources: from something per token, by section, to what the queries of each section read of it.
    """

    order: Order
    column: Array
    segment: Array
    sources: Callable[[Sections], Sections]


def visible_keys(
    column: Sections, segment: Sections, source_column: Sections, source_segment: Sections
) -> Sections:
    """Per section ``[row, time, source]``: which keys each query may read."""
    return tuple(
        (q_column[:, :, None] >= k_column[:, None, :])
        & (q_segment[:, :, None] == k_segment[:, None, :])
        & (k_segment > 0)[:, None, :]
        for q_column, q_segment, k_column, k_segment in zip(
            column, segment, source_column, source_segment, strict=True
        )
    )
