"""Groups padded to whole blocks."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import jit

from moe.experts.grouped_dot import block_layout, block_size

# More rows than the larger tile, so that both are used; a group may be all of them or none.
ROWS, GROUPS, INNER, OUTER = 300, 5, 6, 7
in_blocks = jit(block_layout, static_argnums=1)


@given(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_rows_stand_in_block_layout_their_group(cuts):
    sizes = np.diff(sorted(cuts), prepend=0)
    row, slot, group = jax.device_get(in_blocks(sizes.astype(np.int32), ROWS))
    of_row = np.repeat(np.arange(GROUPS), sizes)
    for index, expected in enumerate(of_row):
        assert row.reshape(-1)[slot[index]] == index
        assert group[slot[index] // row.shape[1]] == expected
    assert (slot[len(of_row) :] == row.size).all()
    assert sorted(row[row < ROWS]) == list(range(len(of_row)))
    assert ((group >= 0) & (group < GROUPS)).all()


@pytest.mark.parametrize("num_groups", [1, 3, 8, 128])
def test_block_sizes_are_powers_of_two_in_bounds(num_groups):
    sizes = [block_size(num_rows, num_groups) for num_rows in range(1, 200_000, 997)]
    assert set(sizes) <= {8, 16, 32, 64, 128, 256, 512}
    assert sizes == sorted(sizes)
    assert sizes[0] == 8
    if num_groups < 128:
        assert sizes[-1] == 512
