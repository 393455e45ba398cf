"""How many columns are read, and how far rows go on in them."""

import numpy as np
import pytest

from jrl.rollout.decoding.columns import columns_read, reach


@pytest.mark.parametrize(
    ("end", "columns", "read"),
    [
        (10, 40, 40),
        (64, 108, 64),
        (65, 108, 108),
        (65, 264, 128),
        # Where that is most of them, a part costs as much to copy as it saves.
        (129, 264, 264),
        (64, 95, 95),
        (64, 96, 64),
    ],
)
def test_a_power_of_two_or_all_columns_are_read(end, columns, read):
    assert columns_read(end, columns) == read


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
    ],
)
def test_rows_go_on_as_far_as_few_columns_hold_them(lengths, limits, window, columns, expected):
    found = reach(np.array(lengths), np.array(limits), window, columns)
    assert found == expected
    assert columns_read(found[1], columns) >= found[1]
