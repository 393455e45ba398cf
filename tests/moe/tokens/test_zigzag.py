"""The zig-zag layout: a bijection with rows, fair to every rank, and free on one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import full_but

from moe.tokens.zigzag import ZigzagLayout

SECTIONS = ((2, 5), (3, 9))


def sections(*rest):
    """Numbers from 1, so that padding (0) is none of them."""
    first, second = (int(np.prod((*s, *rest))) for s in SECTIONS)
    numbers = jnp.arange(1, first + second + 1)
    return numbers[:first].reshape(*SECTIONS[0], *rest), numbers[first:].reshape(
        *SECTIONS[1], *rest
    )


@pytest.mark.parametrize("ranks", full_but([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("rest", [(), (7,)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_stream_holds_every_token_once(ranks, rest, contiguous):
    zigzag, given = ZigzagLayout(SECTIONS, ranks, contiguous), sections(*rest)
    packed = zigzag.flatten(*given)
    assert packed.shape == (zigzag.num_tokens, *rest)
    for back, x in zip(zigzag.restore(packed), given, strict=True):
        np.testing.assert_array_equal(back, x)
    numbers = np.sort(np.asarray(packed).reshape(-1))
    np.testing.assert_array_equal(numbers[numbers > 0], np.concatenate([x.ravel() for x in given]))
    # A rank's part, taken apart by section and put together again.
    for part in packed.reshape(ranks, -1, *rest):
        split = zigzag.split(part)
        assert [x.shape[0] for x in split] == [2, 3]
        np.testing.assert_array_equal(zigzag.join(*split), part)


@pytest.mark.parametrize("ranks", full_but([2, 3, 4], 3))
def test_each_rank_has_a_piece_from_either_end(ranks):
    length = 2 * ranks * 3
    zigzag = ZigzagLayout(((2, length),), ranks)
    rows = jnp.arange(2 * length).reshape(2, length)
    for rank, part in enumerate(zigzag.flatten(rows).reshape(ranks, -1)):
        (own,) = zigzag.split(part)
        early, late = 3 * rank, 3 * (2 * ranks - 1 - rank)
        columns = [*range(early, early + 3), *range(late, late + 3)]
        np.testing.assert_array_equal(own, rows[:, np.array(columns)])


@pytest.mark.parametrize("ranks", full_but([2, 3, 4], 3))
def test_contiguous_parts_follow_each_other(ranks):
    """As many tokens as in zig-zag; of one row nothing is moved."""
    zigzag = ZigzagLayout(SECTIONS, ranks, contiguous=True)
    assert zigzag.num_tokens == ZigzagLayout(SECTIONS, ranks).num_tokens
    row = jnp.arange(1, 10)[None]
    one = ZigzagLayout(((1, 9),), ranks, contiguous=True)
    np.testing.assert_array_equal(one.flatten(row)[:9], row[0])
    whole = zigzag.flatten(*(jnp.broadcast_to(jnp.arange(n)[None], (m, n)) for m, n in SECTIONS))
    parts = [zigzag.split(part)[1] for part in whole.reshape(ranks, -1)]
    np.testing.assert_array_equal(
        np.concatenate(parts, axis=1)[:, :9], np.arange(9)[None] + [[0]] * 3
    )


@pytest.mark.parametrize("ranks", full_but([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("contiguous", [False, True])
def test_place_finds_every_column(ranks, contiguous):
    zigzag = ZigzagLayout(SECTIONS, ranks, contiguous)
    columns = [jnp.tile(jnp.arange(length)[None], (rows, 1)) for rows, length in SECTIONS]
    parts = [zigzag.split(part) for part in zigzag.flatten(*columns).reshape(ranks, -1)]
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
    columns = zigzag.flatten(jnp.arange(length)[None]).reshape(ranks, -1)
    pairs = (np.asarray(columns) + 1).sum(axis=1)
    assert set(pairs) == {length * (length + 1) // 2 // ranks}


def test_one_rank_moves_nothing():
    zigzag = ZigzagLayout(SECTIONS, 1)
    laid_out = jax.make_jaxpr(zigzag.flatten)(*sections())
    back = jax.make_jaxpr(zigzag.restore)(zigzag.flatten(*sections()))
    used = {str(equation.primitive) for jaxpr in (laid_out, back) for equation in jaxpr.eqns}
    assert used <= {"reshape", "concatenate", "split", "slice"}
    np.testing.assert_array_equal(zigzag.flatten(*sections()), np.arange(1, zigzag.num_tokens + 1))
