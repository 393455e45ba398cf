"""Attention mask of a packed batch whose tokens are sharded over ``cp``."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from moe.attention.mask import Marks
from moe.tokens.zigzag import ZigzagLayout

Query = Float[Array, "token heads head_dim"]
Key = Float[Array, "token kv_heads head_dim"]
Value = Float[Array, "token kv_heads v_head_dim"]
Output = Float[Array, "token heads v_head_dim"]
Sections = tuple[Array, ...]
Sinks = Float[Array, "heads"] | None


class Source(NamedTuple):
    """A section whose keys the queries of a section may attend to.

    Attributes:
      section: its index.
      copies: number of consecutive rows of queries that share one of its rows.
    """

    section: int
    copies: int

    def rows(self, x: Shaped[Array, "row *rest"]) -> Shaped[Array, "_row *rest"]:
        """Repeats each row for the rows of queries that share it."""
        return x if self.copies == 1 else jnp.repeat(x, self.copies, axis=0)

    def sums(self, x: Shaped[Array, "_row *rest"]) -> Shaped[Array, "row *rest"]:
        """Gradient of `rows`: the sum over the rows of queries that share a row."""
        return jnp.sum(x.reshape(-1, self.copies, *x.shape[1:]), axis=1)


class SegmentMask(NamedTuple):
    """Causal mask within segments for a packed batch, as numbers per token (segment ids, in
    MaxText's words): no array of queries times keys is made before the ranges of these numbers show
    that some of it may be visible.

    Attributes:
      zigzag: layout of the batch's tokens.
      marks: ``[token]`` each, of all tokens of the batch.
      sources: by section, the sections that its queries may attend to, the last of them itself: the
        columns of a section follow those of the sections before it.
      single: a row has no segments but 1 and padding.
    """

    zigzag: ZigzagLayout
    marks: Marks
    sources: tuple[tuple[Source, ...], ...]
    single: bool

    def key_sections(self, sections: Sections) -> Sections:
        """Keys for the queries of each section, from an array per token by section: the rows of all
        its sources, concatenated along time."""

        def joined(parts: list[Array]) -> Array:
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

        return tuple(
            joined([source.rows(sections[source.section]) for source in sources])
            for sources in self.sources
        )

    def marks_of(self, by_token: Marks) -> tuple[Marks, ...]:
        """Marks by section, from those of one rank's part of the tokens."""
        return _marks(self.zigzag.split(x) for x in by_token)

    def whole_marks(self) -> tuple[Marks, ...]:
        """Marks by section, of all ranks, in the order of columns."""
        return _marks(self.zigzag.restore(x) for x in self.marks)

    def key_marks(self, sections: tuple[Marks, ...]) -> tuple[Marks, ...]:
        """`key_sections` of marks."""
        return _marks(self.key_sections(x) for x in zip(*sections, strict=True))


def _marks(by_kind) -> tuple[Marks, ...]:
    """Transposes arrays by mark and section to `Marks` by section."""
    return tuple(Marks(*own) for own in zip(*by_kind, strict=True))
