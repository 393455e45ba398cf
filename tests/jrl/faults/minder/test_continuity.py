"""Continuity against loops over all stretches, and scoring only the windows that can matter."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.faults.collect.fleet import NO_MACHINE
from jrl.faults.minder.detect import UNSEEN, find_span, score_where_needed

WINDOWS = st.lists(st.sampled_from([NO_MACHINE, 0, 0, 0, 1]), min_size=0, max_size=70)


def slow_span(named, length, share):
    """The machine and first and last hit of the stretch with most hits, by trying all of them."""
    best = None
    for machine in sorted({name for name in named if name >= 0}):
        good = [
            i
            for i in range(len(named) - length + 1)
            if sum(name == machine for name in named[i : i + length]) >= share * length - 1e-9
        ]
        runs = []
        for i in good:
            if runs and runs[-1][-1] == i - 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        for run in runs:
            hits = [i for i in range(run[0], run[-1] + length) if named[i] == machine]
            if best is None or len(hits) > best[3]:
                best = (machine, hits[0], hits[-1], len(hits))
    return best


@given(WINDOWS, st.sampled_from([5, 9, 16]), st.sampled_from([1.0, 0.9, 0.6]))
@settings(max_examples=60, deadline=None)
def test_a_span_against_a_loop(named, length, share):
    span = find_span(np.array(named, int), length=length, share=share)
    expected = slow_span(named, length, share)
    found = None if span is None else (span.machine, span.first, span.last, span.hits)
    assert found == expected


@given(WINDOWS, st.sampled_from([5, 9, 16, 40]), st.sampled_from([1.0, 0.9, 0.6]))
@settings(max_examples=60, deadline=None)
def test_looking_where_needed_finds_the_same(named, length, share):
    named = np.array(named, int)
    lazy = score_where_needed(lambda at: named[at], len(named), length=length, share=share)
    assert find_span(lazy, length=length, share=share) == find_span(
        named, length=length, share=share
    )
    seen = lazy != UNSEEN
    np.testing.assert_array_equal(lazy[seen], named[seen])


def test_little_is_looked_at_where_nothing_lasts():
    named = np.random.default_rng(0).integers(0, 50, 893)
    lazy = score_where_needed(lambda at: named[at], 893, length=233, share=0.9)
    assert (lazy != UNSEEN).sum() == len(range(0, 893, 8))


@pytest.mark.parametrize("hits", [232, 233])
def test_one_second_too_short_is_no_alarm(hits):
    named = np.full(893, NO_MACHINE)
    named[100 : 100 + hits] = 4
    span = find_span(named, length=233)
    assert (span is not None) == (hits == 233)
