"""Rows sorted by group, their slots, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.experts.permutation import (
    inverse_slots,
    positions_within,
    sort_by_group,
    spread_rows,
    sum_rows,
    take_rows,
)

NUM_EXPERTS, D_MODEL, D_EXPERT = 5, 6, 7
exactly = settings(max_examples=25, deadline=None, derandomize=True)


def rows_in(last):
    """Ids up to `last`, of a few lengths so that little is compiled."""
    return st.sampled_from([1, 8, 43]).flatmap(
        lambda length: st.lists(st.integers(0, last), min_size=length, max_size=length)
    )


def rows_of(num_rows, seed=1):
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.normal(size=(num_rows, D_MODEL)), jnp.float32)


@exactly
@given(rows_in(7))
def test_positions_within_count_each_group(ids):
    position, count = positions_within(jnp.asarray(ids), NUM_EXPERTS)
    seen = [0] * NUM_EXPERTS
    for row, group in enumerate(ids):
        if group < NUM_EXPERTS:
            assert position[row] == seen[group]
            seen[group] += 1
    assert count.tolist() == seen


@exactly
@given(st.data())
def test_inverse_slots_undo_slots(data):
    num_slots = data.draw(st.sampled_from([1, 4, 11]))
    # Places past the end stand for rows that have none.
    slots = data.draw(st.permutations(range(num_slots + 4)))[: data.draw(st.sampled_from([1, 4]))]
    rows = inverse_slots(jnp.asarray(slots), num_slots).tolist()
    for slot in range(num_slots):
        assert rows[slot] == (slots.index(slot) if slot in slots else len(slots))


def test_take_rows_gives_zeros_past_the_end():
    x = jnp.arange(6.0).reshape(3, 2) + 1
    taken = take_rows(x, jnp.asarray([2, 3, 0, 99]))
    np.testing.assert_array_equal(taken, [[5, 6], [0, 0], [1, 2], [0, 0]])


@exactly
@given(rows_in(NUM_EXPERTS + 1))
def test_rows_are_sorted_by_group_and_keep_their_order_within(ids):
    order, sizes = sort_by_group(jnp.asarray(ids), NUM_EXPERTS)
    known = [row for group in range(NUM_EXPERTS) for row in range(len(ids)) if ids[row] == group]
    assert order.tolist()[: len(known)] == known
    assert sorted(order.tolist()) == list(range(len(ids)))
    assert sizes.tolist() == [ids.count(group) for group in range(NUM_EXPERTS)]


def test_more_pairs_of_group_and_row_than_integers_are_refused():
    with pytest.raises(ValueError, match=r"8388608 rows of 256 groups .* route fewer rows"):
        jax.eval_shape(lambda x: sort_by_group(x, 256), jax.ShapeDtypeStruct((2**23,), jnp.int32))


# Four rows, of which the second has no slot, and five slots, of which the third is empty.
SOURCE, PLACES = [2, 0, 4, 3, 2], [[1, 5], [5, 5], [4, 0], [5, 3]]


def test_rows_are_spread_with_the_gradient_of_indexing():
    source, places = jnp.asarray(SOURCE), jnp.asarray(PLACES)
    x, pull = rows_of(4), rows_of(5, seed=2)
    out, back = jax.vjp(lambda x: spread_rows(x, source, places), x)
    expected, by_indexing = jax.vjp(lambda x: take_rows(x, source), x)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(back(pull)[0], by_indexing(pull)[0])


def test_rows_are_summed_with_the_gradient_of_indexing():
    source, places = jnp.asarray(SOURCE), jnp.asarray(PLACES)
    x, pull = rows_of(5), rows_of(4, seed=2)
    out, back = jax.vjp(lambda x: sum_rows(x, places, source), x)
    expected, by_indexing = jax.vjp(lambda x: jnp.sum(take_rows(x, places), axis=1), x)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(back(pull)[0], by_indexing(pull)[0])


def test_half_precision_is_summed_in_float32():
    """Sixty-five terms, 1 and then such that bfloat16 would lose each of them."""
    x = jnp.concatenate([jnp.ones((1, 2)), jnp.full((64, 2), 2.0**-9)]).astype(jnp.bfloat16)
    source, places = jnp.zeros(65, jnp.int32), jnp.arange(65)[None]
    out = sum_rows(x, places, source)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.full((1, 2), 1.125))
    (by_row,) = jax.vjp(lambda row: spread_rows(row, source, places), x[:1])[1](x)
    np.testing.assert_array_equal(by_row, jnp.full((1, 2), 1.125, jnp.bfloat16))


def test_spread_rows_are_made_in_another_dtype_with_a_wide_gradient():
    x, source, places = rows_of(1), jnp.zeros(3, jnp.int32), jnp.arange(3)[None]
    out, back = jax.vjp(lambda x: spread_rows(x, source, places, jnp.bfloat16), x)
    assert out.dtype == jnp.bfloat16
    pull = jnp.asarray([1.0, 2.0**-9, 2.0**-9], jnp.bfloat16)[:, None] * jnp.ones_like(out)
    (by_row,) = back(pull)
    np.testing.assert_array_equal(by_row, np.full((1, D_MODEL), 1 + 2.0**-8, np.float32))
