"""Batches of equal predicted time."""

import numpy as np
import pytest

from moe.disaggregated.batches import equal_batches, seconds

TIMES = {"of_token": 2.0, "of_cached": 0.01}


def test_times_are_closer_than_those_of_batches_of_equal_number():
    contexts = np.random.default_rng(0).lognormal(6, 1, 60).astype(int)
    found = equal_batches(contexts, 5, 16, **TIMES)
    times = seconds(contexts, found, 5, **TIMES)
    dealt = seconds(contexts, np.arange(60) % 5, 5, **TIMES)
    assert times.sum() == pytest.approx(dealt.sum())
    assert np.ptp(times) < 0.05 * np.ptp(dealt)
    assert np.bincount(found).max() <= 16


def test_slots_are_a_limit():
    # By time alone the three short ones would share a batch.
    assert np.bincount(equal_batches(np.array([900, 1, 1, 1]), 2, 2, **TIMES)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("number", "times", "words"),
    [
        (2, TIMES, "num_bins=2 of capacity=3 do not hold 7 items"),
        (3, {"of_token": -1.0, "of_cached": 0.0}, "of_token=-1.0"),
    ],
)
def test_what_has_no_answer_is_refused(number, times, words):
    with pytest.raises(ValueError, match=words):
        equal_batches(np.ones(7), number, 3, **times)
