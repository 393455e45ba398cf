"""Rows sorted by group, their slots, and the way back."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import array_sizes, jit

from moe.experts.permutation import permute_rows, unpermute_rows
from moe.ops.sorting import inverse_slots, positions_within, sort_by_group, take_rows

NUM_EXPERTS, D_MODEL, D_EXPERT = 5, 6, 7
positions = jit(positions_within, static_argnums=1)
inverse = jit(inverse_slots, static_argnums=1)
ordered = jit(sort_by_group, static_argnums=1)
exactly = settings(max_examples=25, deadline=None, derandomize=True)


def rows_in(last):
    """Ids up to `last`, of a few lengths so that little is compiled."""
    return st.sampled_from([1, 8, 43]).flatmap(
        lambda length: st.lists(st.integers(0, last), min_size=length, max_size=length)
    )


def rows_of(num_rows, seed=1):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(num_rows, D_MODEL)).astype(np.float32)


@exactly
@given(rows_in(7))
def test_positions_within_count_each_group(ids):
    position, count = jax.device_get(positions(np.asarray(ids, np.int32), NUM_EXPERTS))
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
    rows = inverse(np.asarray(slots, np.int32), num_slots).tolist()
    for slot in range(num_slots):
        assert rows[slot] == (slots.index(slot) if slot in slots else len(slots))


def test_take_rows_gives_zeros_past_the_end():
    x = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
    taken = jit(take_rows)(x, np.asarray([2, 3, 0, 99], np.int32))
    np.testing.assert_array_equal(taken, [[5, 6], [0, 0], [1, 2], [0, 0]])


@exactly
@given(rows_in(NUM_EXPERTS + 1))
def test_rows_are_sorted_by_group_and_keep_their_order_within(ids):
    order, sizes = ordered(np.asarray(ids, np.int32), NUM_EXPERTS)
    known = [row for group in range(NUM_EXPERTS) for row in range(len(ids)) if ids[row] == group]
    assert order.tolist()[: len(known)] == known
    assert sorted(order.tolist()) == list(range(len(ids)))
    assert sizes.tolist() == [ids.count(group) for group in range(NUM_EXPERTS)]


def test_more_pairs_of_group_and_row_than_integers_are_refused():
    with pytest.raises(ValueError, match=r"8388608 rows of 256 groups .* route fewer rows"):
        jax.eval_shape(lambda x: sort_by_group(x, 256), jax.ShapeDtypeStruct((2**23,), jnp.int32))


# Four rows, of which the second has no slot, and five slots, of which the third is empty.
SOURCE, PLACES = (
    np.asarray(ids, np.int32) for ids in ([2, 0, 4, 3, 2], [[1, 5], [5, 5], [4, 0], [5, 3]])
)


@partial(jit, static_argnums=0)
def pulled(function, x, pull, source, places):
    """What ``function(x, source, places)`` gives, and its gradient."""
    out, back = jax.vjp(lambda x: function(x, source, places), x)
    return out, *back(pull)


def test_rows_are_spread_with_the_gradient_of_indexing():
    given = rows_of(4), rows_of(5, seed=2), SOURCE, PLACES
    found = pulled(permute_rows, *given)
    expected = pulled(lambda x, source, places: take_rows(x, source), *given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rows_are_summed_with_the_gradient_of_indexing():
    given = rows_of(5), rows_of(4, seed=2), SOURCE, PLACES
    found = pulled(lambda x, source, places: unpermute_rows(x, places, source), *given)

    def indexed(x, source, places):
        return jnp.sum(x.at[places].get(mode="fill", fill_value=0), axis=1)

    expected = pulled(indexed, *given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_copies_of_rows_are_never_there_at_once():
    """Neither to sum them nor for the gradient of spreading them: of all tokens of a group of
    devices and eight choices each they would be a program's largest array."""
    given = rows_of(4), rows_of(5), SOURCE, PLACES

    def both(x, pull, source, places):
        out, back = jax.vjp(lambda x: permute_rows(x, source, places), x)
        return unpermute_rows(out, places, source), back(pull)

    assert max(array_sizes(jax.make_jaxpr(both)(*given).jaxpr)) <= rows_of(5).size


@pytest.mark.slow
def test_half_precision_is_summed_in_float32():
    """Sixty-five terms, 1 and then such that bfloat16 would lose each of them."""
    x = np.concatenate([np.ones((1, 2)), np.full((64, 2), 2.0**-9)]).astype(jnp.bfloat16)
    source, places = np.zeros(65, np.int32), np.arange(65, dtype=np.int32)[None]
    out = jit(unpermute_rows)(x, places, source)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.full((1, 2), 1.125))
    _, by_row = pulled(permute_rows, x[:1], x, source, places)
    np.testing.assert_array_equal(by_row, np.full((1, 2), 1.125, jnp.bfloat16))


def test_spread_rows_are_made_in_another_dtype_with_a_wide_gradient():
    source, places = np.zeros(3, np.int32), np.arange(3, dtype=np.int32)[None]
    pull = np.repeat(np.float32([[1.0], [2.0**-9], [2.0**-9]]), D_MODEL, axis=1)
    in_half = partial(permute_rows, dtype=jnp.bfloat16)
    out, by_row = pulled(in_half, rows_of(1), pull.astype(jnp.bfloat16), source, places)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(by_row, np.full((1, D_MODEL), 1 + 2.0**-8, np.float32))
