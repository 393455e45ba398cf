"""Which keys a query may attend to: earlier or equal columns of its own segment."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float

from moe.tokens.zigzag import ZigzagLayout

Query = Float[Array, "token heads head_dim"]
Key = Float[Array, "token kv_heads head_dim"]
Value = Float[Array, "token kv_heads v_head_dim"]
Output = Float[Array, "token heads v_head_dim"]
Sections = tuple[Array, ...]


class SegmentMask(NamedTuple):
    """The mask of a packed batch, causal within segments, as marks of its tokens (segment ids, in
    MaxText's words): no array of queries times keys is made before it is known which of them meet.

    Attributes:
      zigzag: where the batch's tokens stand.
      column: ``[token]`` place in the row.
      segment: ``[token]`` id of the sequence within the row; 0 for padding, which nobody attends
        to.
      key_sections: from something per token, by section, to that of the keys which each section's
        queries may attend to: their own section, or the shared prompt before it too.
    """

    zigzag: ZigzagLayout
    column: Array
    segment: Array
    key_sections: Callable[[Sections], Sections]


def visible_keys(
    column: Sections, segment: Sections, source_column: Sections, source_segment: Sections
) -> Sections:
    """Per section ``[row, time, source]``: which keys each query may attend to."""
    # Columns, not positions: padding and earlier segments of the row keep their columns.
    return tuple(
        (q_column[:, :, None] >= k_column[:, None, :])
        & (q_segment[:, :, None] == k_segment[:, None, :])
        & (k_segment > 0)[:, None, :]
        for q_column, q_segment, k_column, k_segment in zip(
            column, segment, source_column, source_segment, strict=True
        )
    )
