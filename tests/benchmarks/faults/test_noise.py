"""Innocent disturbances: what each does to a record in which nothing else happens."""

import numpy as np
import pytest

from benchmarks.faults.simulate import METRICS, PRODUCTION, Settings, simulate
from benchmarks.faults.simulate.healthy import LONGEST_BURST, burst, misread, read_late

SHAPE = (30, len(PRODUCTION), 600)


def changed(disturb, level=0.5, seed=3, often=1):
    """What `disturb` changes in a constant record, ``[machine, metric, time]``."""
    values = np.full(SHAPE, level, np.float32)
    settings = Settings(machines=SHAPE[0], seconds=SHAPE[2], disturbances=often)
    disturb(values, settings, np.random.default_rng(seed))
    return values - np.float32(level)


def lengths(rows):
    """Of the stretches in which a row changes."""
    edges = np.diff(np.pad(rows != 0, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    return np.argwhere(edges == -1)[:, 1] - np.argwhere(edges == 1)[:, 1]


def test_a_late_counter_has_the_rest_in_the_next_second():
    change = changed(read_late, often=4)
    counters = [c for c, name in enumerate(PRODUCTION) if METRICS[name].counter]
    assert [PRODUCTION[c] for c in counters] == ["pfc_tx_packet_rate", "nvlink_bandwidth"]
    assert not np.delete(change, counters, axis=1).any()
    late = np.argwhere(change[:, counters[0]] < 0)
    assert len(late) > 100
    # One process reads all counters of a machine.
    np.testing.assert_array_equal(change[:, counters[0]], change[:, counters[1]])
    alone = [(m, t) for m, t in late if np.abs(change[m, counters[0], t + 2 : t + 3]).sum() == 0]
    after = np.array([change[m, counters[0], t : t + 2] for m, t in alone])
    first = np.array([t == 0 or change[m, counters[0], t - 1] == 0 for m, t in alone])
    assert first.sum() > 50
    np.testing.assert_allclose(after[first].sum(1), 0, atol=1e-6)
    assert (after[first, 0] <= -0.25).all()


def test_misread_seconds_are_alone_and_of_the_right_sign():
    change = changed(misread)
    for column, name in enumerate(PRODUCTION):
        rows = change[:, column]
        assert (rows != 0).any(), name
        assert np.median(lengths(rows)) == 1
        below = METRICS[name].gpu
        assert (rows <= 0).all() if below else (rows >= 0).all()
        if below:
            assert np.max(rows[rows != 0]) <= -0.25 + 1e-6


def test_bursts_are_short_and_those_of_a_gpu_come_together():
    change = changed(burst, often=20)
    gpu = [c for c, name in enumerate(PRODUCTION) if METRICS[name].gpu]
    assert len(gpu) == 4
    for column in gpu[1:]:
        np.testing.assert_array_equal(change[:, column], change[:, gpu[0]])
    assert (change[:, gpu] <= 0).all()
    assert (np.delete(change, gpu, axis=1) >= 0).all()
    found = np.concatenate([lengths(change[:, column]) for column in range(SHAPE[1])])
    assert len(found) > 20
    assert 3 < np.median(found) < 20
    assert found.max() <= 2 * LONGEST_BURST  # two may overlap


def test_fleets_differ_in_how_restless_they_are():
    counts = [(changed(misread, seed=seed)[:, 1] != 0).sum() for seed in range(60)]
    # Lognormal with deviation 1.1, which 60 fleets tell to a tenth.
    assert 0.8 < np.log(counts).std() < 1.4


@pytest.mark.parametrize("metric", ["pfc_tx_packet_rate", "cpu_usage"])
def test_no_disturbances_leave_the_rhythm_and_the_noise(metric):
    quiet = Settings(
        machines=6, seconds=300, metrics=(metric,), faulty=False, disturbances=0, missing=0
    )
    fleet = simulate(quiet, 5).fleet
    values = fleet.values[:, 0] / METRICS[metric].capacity
    jumps = np.abs(np.diff(values, axis=1))
    # A lone reading that is off would jump by more than rhythm and noise together do.
    assert np.nanmax(jumps) < abs(METRICS[metric].compute) + 8 * METRICS[metric].noise * 1.5
