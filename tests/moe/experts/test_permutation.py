"""Rows sorted by group, their slots, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.experts.permutation import (
    inverse_slots,
    permute,
    positions_within,
    sort_by_group,
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


def test_permute_has_the_gradient_of_indexing():
    order = jnp.asarray([2, 0, 3, 1])
    x, pull = rows_of(4), rows_of(4, seed=2)
    out, back = jax.vjp(lambda x: permute(x, order, jnp.argsort(order)), x)
    np.testing.assert_array_equal(out, x[order])
    np.testing.assert_array_equal(back(pull)[0], jax.vjp(lambda x: x[order], x)[1](pull)[0])
