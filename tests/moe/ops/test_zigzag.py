"""The zig-zag layout: a bijection with rows, fair to every rank, and free on one of them."""

from functools import partial
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
from programs import jit
from tiers import full_but

from moe.ops.zigzag import ZigzagLayout

SECTIONS = ((2, 5), (3, 9))


def sections(*rest):
    """Numbers from 1, so that padding (0) is none of them."""
    first, second = (int(np.prod((*s, *rest))) for s in SECTIONS)
    numbers = np.arange(1, first + second + 1, dtype=np.int32)
    return numbers[:first].reshape(*SECTIONS[0], *rest), numbers[first:].reshape(
        *SECTIONS[1], *rest
    )


def columns():
    """The column of each place, by section."""
    return [np.tile(np.arange(size, dtype=np.int32), (rows, 1)) for rows, size in SECTIONS]


class LaidOut(NamedTuple):
    """The stream, the sections that come back, and of each rank's part of the stream its rows by
    section and these put together again."""

    stream: np.ndarray
    restored: list[np.ndarray]
    split: list[list[np.ndarray]]
    joined: list[np.ndarray]


@partial(jit, static_argnums=0)
def _laid_out(zigzag, *given):
    stream = zigzag.flatten(*given)
    parts = stream.reshape(zigzag.ranks, -1, *stream.shape[1:])
    split = [zigzag.split(part) for part in parts]
    joined = [zigzag.join(*sections) for sections in split]
    return stream, list(zigzag.restore(stream)), list(map(list, split)), joined


def laid_out(zigzag, *given):
    return LaidOut(*jax.device_get(_laid_out(zigzag, *given)))


@pytest.mark.parametrize("ranks", full_but([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("rest", [(), (7,)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_stream_holds_every_token_once(ranks, rest, contiguous):
    zigzag, given = ZigzagLayout(SECTIONS, ranks, contiguous), sections(*rest)
    found = laid_out(zigzag, *given)
    assert found.stream.shape == (zigzag.num_tokens, *rest)
    chex.assert_trees_all_equal(list(found.restored), list(given))
    numbers = np.sort(found.stream.reshape(-1))
    np.testing.assert_array_equal(numbers[numbers > 0], np.concatenate([x.ravel() for x in given]))
    # A rank's part, taken apart by section and put together again.
    parts = found.stream.reshape(ranks, -1, *rest)
    for part, split, joined in zip(parts, found.split, found.joined, strict=True):
        assert [x.shape[0] for x in split] == [2, 3]
        np.testing.assert_array_equal(joined, part)


@pytest.mark.parametrize("ranks", full_but([2, 3, 4], 3))
def test_each_rank_has_a_piece_from_either_end(ranks):
    length = 2 * ranks * 3
    zigzag = ZigzagLayout(((2, length),), ranks)
    rows = np.arange(2 * length, dtype=np.int32).reshape(2, length)
    for rank, (own,) in enumerate(laid_out(zigzag, rows).split):
        early, late = 3 * rank, 3 * (2 * ranks - 1 - rank)
        columns = [*range(early, early + 3), *range(late, late + 3)]
        np.testing.assert_array_equal(own, rows[:, np.array(columns)])


@pytest.mark.parametrize("ranks", full_but([2, 3, 4], 3))
def test_contiguous_parts_follow_each_other(ranks):
    """As many tokens as in zig-zag; of one row nothing is moved."""
    zigzag = ZigzagLayout(SECTIONS, ranks, contiguous=True)
    assert zigzag.num_tokens == ZigzagLayout(SECTIONS, ranks).num_tokens
    row = np.arange(1, 10, dtype=np.int32)[None]
    one = ZigzagLayout(((1, 9),), ranks, contiguous=True)
    np.testing.assert_array_equal(laid_out(one, row).stream[:9], row[0])
    parts = [split[1] for split in laid_out(zigzag, *columns()).split]
    np.testing.assert_array_equal(
        np.concatenate(parts, axis=1)[:, :9], np.arange(9)[None] + [[0]] * 3
    )


@pytest.mark.parametrize("ranks", full_but([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("contiguous", [False, True])
def test_place_finds_every_column(ranks, contiguous):
    zigzag = ZigzagLayout(SECTIONS, ranks, contiguous)
    parts = laid_out(zigzag, *columns()).split
    for section, (_, length) in enumerate(SECTIONS):
        for column in range(length):
            rank, offset = zigzag.locate(section, column)
            np.testing.assert_array_equal(parts[rank][section][:, offset], column)


@pytest.mark.parametrize("ranks", full_but([2, 3, 4, 8], 3, 8))
@pytest.mark.parametrize("chunk", [1, 3])
def test_every_rank_reads_as_much(ranks, chunk):
    """Visible pairs under the causal mask, exactly equal where the length divides."""
    length = 2 * ranks * chunk
    zigzag = ZigzagLayout(((1, length),), ranks)
    given = np.arange(length, dtype=np.int32)[None]
    columns = laid_out(zigzag, given).stream.reshape(ranks, -1)
    pairs = (columns + 1).sum(axis=1)
    assert set(pairs) == {length * (length + 1) // 2 // ranks}


def test_one_rank_moves_nothing():
    zigzag = ZigzagLayout(SECTIONS, 1)
    there = jax.make_jaxpr(zigzag.flatten)(*sections())
    stream = laid_out(zigzag, *sections()).stream
    back = jax.make_jaxpr(zigzag.restore)(stream)
    used = {str(equation.primitive) for jaxpr in (there, back) for equation in jaxpr.eqns}
    assert used <= {"reshape", "concatenate", "split", "slice"}
    np.testing.assert_array_equal(stream, np.arange(1, zigzag.num_tokens + 1))
