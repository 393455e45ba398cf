"""Attention mask of a packed batch whose tokens are sharded over ``cp``."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from moe.attention.mask import TokenIndices
from moe.tokens.zigzag import ZigzagLayout

Query = Float[Array, "token heads head_dim"]
Key = Float[Array, "token kv_heads head_dim"]
Value = Float[Array, "token kv_heads v_head_dim"]
Output = Float[Array, "token heads v_head_dim"]
Sections = tuple[Array, ...]
Sinks = Float[Array, "heads"] | None


class KeySource(NamedTuple):
    """A section whose keys the queries of a section may attend to.

    Attributes:
      section: its index.
      repeats: number of consecutive rows of queries that share one of its rows.
    """

    section: int
    repeats: int

    def rows(self, x: Shaped[Array, "row *rest"]) -> Shaped[Array, "_row *rest"]:
        """Repeats each row for the rows of queries that share it."""
        return x if self.repeats == 1 else jnp.repeat(x, self.repeats, axis=0)

    def sums(self, x: Shaped[Array, "_row *rest"]) -> Shaped[Array, "row *rest"]:
        """Gradient of `rows`: the sum over the rows of queries that share a row."""
        return jnp.sum(x.reshape(-1, self.repeats, *x.shape[1:]), axis=1)


class SegmentMask(NamedTuple):
    """Causal mask within segments for a packed batch, as numbers per token (segment ids, in
    MaxText's words): no array of queries times keys is made before the ranges of these numbers show
    that some of it may be visible.

    Attributes:
      zigzag: layout of the batch's tokens.
      indices: ``[token]`` each, of all tokens of the batch.
      sources: by section, the sections that its queries may attend to, the last of them itself: the
        columns of a section follow those of the sections before it.
      single: a row has no segments but 1 and padding.
    """

    zigzag: ZigzagLayout
    indices: TokenIndices
    sources: tuple[tuple[KeySource, ...], ...]
    single: bool

    def key_sections(self, sections: Sections) -> Sections:
        """Keys for the queries of each section, from an array per token by section: the rows of all
        its sources, concatenated along time."""

        def concatenate(rows: list[Array]) -> Array:
            return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)

        return tuple(
            concatenate([source.rows(sections[source.section]) for source in sources])
            for sources in self.sources
        )

    def indices_by_section(self, local_indices: TokenIndices) -> tuple[TokenIndices, ...]:
        """`TokenIndices` by section, from those of one rank's shard of the tokens."""
        return _transpose_indices(self.zigzag.split(x) for x in local_indices)

    def full_indices(self) -> tuple[TokenIndices, ...]:
        """`TokenIndices` by section, of all ranks, in the order of columns."""
        return _transpose_indices(self.zigzag.restore(x) for x in self.indices)

    def key_indices(self, sections: tuple[TokenIndices, ...]) -> tuple[TokenIndices, ...]:
        """`key_sections` of `TokenIndices`."""
        return _transpose_indices(self.key_sections(x) for x in zip(*sections, strict=True))


def _transpose_indices(by_field) -> tuple[TokenIndices, ...]:
    """Transposes arrays by field and section to `TokenIndices` by section."""
    return tuple(TokenIndices(*fields) for fields in zip(*by_field, strict=True))
