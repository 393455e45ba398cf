"""Batches of equal predicted time."""

import numpy as np
import pytest

from moe.disaggregated.schedule import AttentionTime, lightest_batch

TIMES = AttentionTime(per_token=2.0, per_cached_token=0.01)


def joined(contexts, number, slots):
    batches = [[] for _ in range(number)]
    for context in contexts:
        times = [TIMES.batch_time(batch) for batch in batches]
        batches[lightest_batch(times, [slots - len(batch) for batch in batches])].append(context)
    return batches


def test_times_are_closer_than_those_of_batches_of_equal_number():
    contexts = np.random.default_rng(0).lognormal(6, 1, 60).astype(int).tolist()
    found = [TIMES.batch_time(batch) for batch in joined(contexts, 5, 16)]
    dealt = [TIMES.batch_time(contexts[number::5]) for number in range(5)]
    assert sum(found) == pytest.approx(sum(dealt))
    # Graham's bound, and better than dealing them out.
    assert max(found) - min(found) <= TIMES.batch_time([max(contexts)])
    assert np.ptp(found) < 0.5 * np.ptp(dealt)


def test_slots_are_a_limit():
    # By time alone the three short ones would share a batch.
    assert [len(batch) for batch in joined([900, 1, 1, 1], 2, 2)] == [2, 2]
    with pytest.raises(ValueError, match="none of 2 batches has a free slot"):
        joined([1] * 5, 2, 2)


def test_a_time_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"per_token=-1\.0"):
        AttentionTime(-1.0, 0.0)
