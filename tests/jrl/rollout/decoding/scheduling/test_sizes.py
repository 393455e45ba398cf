"""How many columns are read, and how far rows go on in them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jrl.rollout.decoding.scheduling.sizes import MIN_WINDOW, cache_length_to_read, plan_window


@pytest.mark.parametrize(
    ("end", "columns", "read"),
    [
        (10, 40, 40),
        (64, 108, 64),
        (65, 108, 108),
        (65, 264, 128),
        # If that is most of them, a part costs as much to copy as it saves.
        (129, 264, 264),
        (64, 95, 95),
        (64, 96, 64),
    ],
)
def test_a_power_of_two_or_all_columns_are_read(end, columns, read):
    assert cache_length_to_read(end, columns) == read


@pytest.mark.parametrize(
    ("lengths", "limits", "window", "columns", "expected"),
    [
        # As far as 64 columns go, with a first token that was not counted.
        ([8, 3], [108, 108], 64, 108, (55, 64)),
        ([50, 3], [108, 108], 64, 108, (64, 108)),
        # The longest row decides, not the first.
        ([3, 8], [108, 108], 64, 1000, (55, 64)),
        ([46], [1000], 64, 1000, (17, 64)),
        ([48], [1000], 64, 1000, (64, 113)),
        # A window of a few tokens stays whole, and so does one in which rows stop.
        ([60], [1000], 9, 1000, (9, 70)),
        ([8, 3], [20, 12], 64, 108, (64, 20)),
        # Neither does a row that is about to stop hold up the others.
        ([63, 40], [64, 264], 64, 264, (23, 64)),
    ],
)
def test_rows_go_on_as_far_as_few_columns_hold_them(lengths, limits, window, columns, expected):
    found = plan_window(np.array(lengths), np.array(limits), window, columns)
    assert found == expected
    assert cache_length_to_read(found[1], columns) >= found[1]


@given(
    rows=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=5),
    window=st.integers(1, 64),
    room=st.integers(0, 400),
)
def test_rows_always_go_on_and_within_what_is_read(rows, window, room):
    lengths = np.array([length for length, _ in rows])
    limits = lengths + 1 + [more for _, more in rows]
    columns = int(limits.max()) + room
    tokens, end = plan_window(lengths, limits, window, columns)
    assert min(MIN_WINDOW, window) <= tokens <= window
    ends = np.minimum(lengths + 1 + tokens, limits)
    assert end == ends.max() <= cache_length_to_read(end, columns) <= columns
