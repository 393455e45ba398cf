"""The mask of a packed batch, whose tokens lie on the devices of ``cp``."""

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
      section: its number.
      copies: how many rows of queries in a row share one of its rows.
    """

    section: int
    copies: int

    def rows(self, x: Shaped[Array, "row *rest"]) -> Shaped[Array, "_row *rest"]:
        """The row of each row of queries."""
        return x if self.copies == 1 else jnp.repeat(x, self.copies, axis=0)

    def sums(self, x: Shaped[Array, "_row *rest"]) -> Shaped[Array, "row *rest"]:
        """The gradient of `rows`."""
        return jnp.sum(x.reshape(-1, self.copies, *x.shape[1:]), axis=1)


class SegmentMask(NamedTuple):
    """The mask of a packed batch, causal within segments, as marks of its tokens (segment ids, in
    MaxText's words): no array of queries times keys is made before it is known which of them meet.

    Attributes:
      zigzag: where the batch's tokens stand.
      marks: ``[token]`` each.
      sources: by section, those that its queries may attend to, the last of them itself: the
        columns of a section follow those of the sections before it.
      single: a row has no segments but 1 and padding.
    """

    zigzag: ZigzagLayout
    marks: Marks
    sources: tuple[tuple[Source, ...], ...]
    single: bool

    def key_sections(self, sections: Sections) -> Sections:
        """From something per token, by section, to that of the keys of each section's queries."""

        def joined(parts: list[Array]) -> Array:
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

        return tuple(
            joined([source.rows(sections[source.section]) for source in sources])
            for sources in self.sources
        )

    def marks_of(self, by_token: Marks) -> tuple[Marks, ...]:
        """By section, of one rank's part of the tokens."""
        return _marks(self.zigzag.split(x) for x in by_token)

    def whole_marks(self) -> tuple[Marks, ...]:
        """By section, of all ranks, in the order of columns."""
        return _marks(self.zigzag.restore(x) for x in self.marks)

    def key_marks(self, sections: tuple[Marks, ...]) -> tuple[Marks, ...]:
        """`key_sections` of marks."""
        return _marks(self.key_sections(x) for x in zip(*sections, strict=True))


def _marks(by_kind) -> tuple[Marks, ...]:
    """By kind and section to by section and kind."""
    return tuple(Marks(*own) for own in zip(*by_kind, strict=True))
