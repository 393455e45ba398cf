"""Gaps, clocks and scales against loops; what is left out is said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.faults.collect.fleet import Fleet
from jrl.faults.minder.embedding import correct_lags, fill, prepare, scale


def fleet_of(values, metrics=None):
    values = np.asarray(values, np.float32)
    machines = tuple(f"m{i}" for i in range(values.shape[0]))
    return Fleet(machines, metrics or tuple("abcd"[: values.shape[1]]), 1000.0, 1.0, values)


def nearest(row, present):
    at = np.flatnonzero(present)
    return [row[min(at, key=lambda j: (abs(j - i), j))] for i in range(len(row))]


@given(
    st.lists(st.lists(st.booleans(), min_size=9, max_size=9).filter(any), min_size=6, max_size=6)
)
@settings(max_examples=60, deadline=None)
def test_gaps_take_the_nearest_sample(present):
    present = np.array(present).reshape(2, 3, 9)
    values = np.arange(54, dtype=np.float32).reshape(2, 3, 9)
    filled = fill(np.where(present, values, np.nan).astype(np.float32), present)
    for m in range(2):
        for n in range(3):
            assert filled[m, n].tolist() == nearest(values[m, n], present[m, n])


def test_scale_takes_the_extremes_of_all_machines():
    values = np.array([[[1, 3], [5, 2]], [[0, 0], [0, 0]]], np.float32)
    np.testing.assert_allclose(scale(values)[0], [[0, 0.5], [1, 0.25]])
    assert not scale(values)[1].any()


def test_clocks_off_by_seconds_are_set_right():
    random = np.random.default_rng(0)
    wave = np.sin(np.arange(300) / 2)
    lags = [0, 2, -1, 0, 0]
    rows = [np.roll(wave, lag) + 0.1 * random.normal(size=300) for lag in lags]
    moved = correct_lags(np.array([rows], np.float32), 2)[0]
    follow = np.corrcoef(moved[:, 5:-5])
    assert follow.min() > 0.95  # less by the noise: 0.98
    assert np.corrcoef(np.array(rows)[:, 5:-5]).min() < 0.5


def test_noise_is_not_moved():
    values = np.random.default_rng(0).normal(size=(2, 6, 200)).astype(np.float32)
    np.testing.assert_array_equal(correct_lags(values, 2), values)


def test_prepare_notes_left_out_machines_and_metrics():
    values = np.random.default_rng(0).normal(size=(5, 4, 40)).astype(np.float32)
    values[1] = np.nan
    values[:, 2] = 7.0
    values[:, 3] = np.inf
    values[2, 0, :30] = np.nan
    prepared = prepare(fleet_of(values))
    assert prepared.machines == ("m0", "m3", "m4")
    assert prepared.metrics == ("a", "b")
    assert np.isfinite(prepared.values).all()
    text = "\n".join(prepared.notes)
    for words in ("'m1' has no data", "'m2' has 25% of", "'c' is 7 everywhere", "'d' has no samp"):
        assert words in text


@pytest.mark.parametrize("shape", [(0, 2, 30), (3, 0, 30), (3, 2, 0)])
def test_empty_fleets_are_prepared(shape):
    prepared = prepare(fleet_of(np.zeros(shape)))
    assert prepared.values.size == 0


def test_the_record_itself_is_not_changed():
    values = np.random.default_rng(0).normal(size=(3, 2, 40)).astype(np.float32)
    values[0, 0, 3:6] = np.nan
    before = values.copy()
    prepare(fleet_of(values))
    np.testing.assert_array_equal(values, before)
