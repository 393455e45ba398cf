"""Zig-zag layout of the tokens of rows in the flat batch, which balances causal attention over
``cp``.

Under the causal mask late tokens attend to more than early ones. If a ``cp`` rank computes the
attention of its local tokens, it therefore gets an early and a late chunk of every row (zig-zag,
Megatron's order for context parallelism): rows are split into ``2 cp`` chunks, and rank ``r`` has
the chunks ``r`` and ``2 cp - 1 - r``. If ranks attend in whole sequences (Ulysses), and so have
equal work in any order, rank ``r`` has the chunks ``2 r`` and ``2 r + 1``: contiguous parts. The
batch is in the order of ranks. On one rank that is row after row, and nothing moves.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Shaped


@dataclass(frozen=True)
class ZigzagLayout:
    """The order of a packed batch made of sections, each some rows of one length.

    A rank's part of the batch is its part of the first section, row after row, then of the next.
    Rows whose length does not divide are padded at their end, inside the batch only, and in both
    orders to the same length: how many tokens there are does not depend on the order.

    Args:
      sections: ``(rows, length)`` of each.
      ranks: devices along ``cp``.
      contiguous: whether a rank's part of a row is one piece of it.

    References:
      Meta, "The Llama 3 Herd of Models", 2024, section 3.3.2 (2 cp chunks, rank i has the i-th from
      either end). https://arxiv.org/abs/2407.21783
    """

    sections: tuple[tuple[int, int], ...]
    ranks: int
    contiguous: bool = False

    @property
    def chunks_per_rank(self) -> int:
        """Chunks of a row on each rank: one from either end or two neighbours, or the whole row on
        one rank."""
        return 1 if self.ranks == 1 else 2

    def padded_length(self, length: int) -> int:
        """The next length that can be cut."""
        unit = self.ranks * self.chunks_per_rank
        return -(-length // unit) * unit

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed batch, padding included."""
        return sum(rows * self.padded_length(length) for rows, length in self.sections)

    def flatten(self, *sections: Shaped[Array, "_row _length *_"]) -> Shaped[Array, "token *_"]:
        """The packed batch of all ranks; padding that it adds is 0."""
        shards = [self._by_rank(x) for x in sections]
        return _concatenate(shards, axis=1).reshape(-1, *shards[0].shape[2:])

    def restore(
        self, packed: Shaped[Array, "token *_"]
    ) -> tuple[Shaped[Array, "_row _length *_"], ...]:
        """The sections of a packed batch, without the padding: the reverse of `flatten`."""
        by_rank = packed.reshape(self.ranks, -1, *packed.shape[1:])
        shards = _split_at(by_rank, self._sizes(), axis=1)
        return tuple(self._by_row(x, *s) for x, s in zip(shards, self.sections, strict=True))

    def split(
        self, shard: Shaped[Array, "token *_"]
    ) -> tuple[Shaped[Array, "_row _shard *_"], ...]:
        """One rank's shard of the batch by section, padding included."""
        shards = _split_at(shard, self._sizes(), axis=0)
        return tuple(
            x.reshape(rows, -1, *x.shape[1:])
            for x, (rows, _) in zip(shards, self.sections, strict=True)
        )

    def join(self, *shards: Shaped[Array, "_row _shard *_"]) -> Shaped[Array, "token *_"]:
        """The reverse of `split`."""
        return _concatenate([x.reshape(-1, *x.shape[2:]) for x in shards], axis=0)

    def locate(self, section: int, column: int) -> tuple[int, int]:
        """The rank that has a column of a section, and the column's position in its shard of a
        row."""
        shard_length = self.padded_length(self.sections[section][1]) // self.ranks
        if self.contiguous:
            return divmod(column, shard_length)
        chunk_size = shard_length // self.chunks_per_rank
        chunk, within = divmod(column, chunk_size)
        if chunk < self.ranks:
            return chunk, within
        return 2 * self.ranks - 1 - chunk, chunk_size + within

    def _sizes(self) -> list[int]:
        return [rows * self.padded_length(length) // self.ranks for rows, length in self.sections]

    def _by_rank(self, x: Array) -> Array:
        """``[rank, token of its part, *_]`` of rows."""
        rows, length, *rest = x.shape
        if self.ranks == 1:
            return x.reshape(1, rows * length, *rest)
        padding = self.padded_length(length) - length
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in rest)))
        if self.contiguous:
            x = x.reshape(rows, self.ranks, -1, *rest)
            return jnp.moveaxis(x, 1, 0).reshape(self.ranks, -1, *rest)
        x = _zigzag(x.reshape(rows, 2, self.ranks, -1, *rest))
        return jnp.moveaxis(x, 2, 0).reshape(self.ranks, -1, *rest)

    def _by_row(self, x: Array, rows: int, length: int) -> Array:
        rest = x.shape[2:]
        if self.ranks == 1:
            return x.reshape(rows, length, *rest)
        if self.contiguous:
            x = jnp.moveaxis(x.reshape(self.ranks, rows, -1, *rest), 0, 1)
            return x.reshape(rows, -1, *rest)[:, :length]
        x = jnp.moveaxis(x.reshape(self.ranks, rows, 2, -1, *rest), 0, 2)
        return _zigzag(x).reshape(rows, -1, *rest)[:, :length]


def _zigzag(x: Array) -> Array:
    """The late half ``[row, half, rank, *_]`` in the opposite order; its own reverse."""
    return jnp.stack([x[:, 0], jnp.flip(x[:, 1], axis=1)], axis=1)


def _concatenate(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)


def _split_at(x: Array, sizes: list[int], axis: int) -> list[Array]:
    """`x` in parts of these sizes along `axis`."""
    starts = [sum(sizes[:n]) for n in range(1, len(sizes))]
    return jnp.split(x, starts, axis) if starts else [x]
