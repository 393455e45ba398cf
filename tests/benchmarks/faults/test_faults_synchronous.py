"""Simulated fleets of synchronous training: what a fault does to its machine and to the others."""

import numpy as np
import pytest

from benchmarks.faults.looks import examine, summary
from benchmarks.faults.synchronous import FAULTS, Synchronous, simulate


def change(incident, metric, own):
    """Mean of a metric in the fault over its mean before, of the machine or of the others."""
    fleet = incident.fleet
    begin, end = (
        round((each - fleet.start) / fleet.period) for each in (incident.start, incident.end)
    )
    row = fleet.machines.index(incident.machine)
    values = fleet.values[:, fleet.metrics.index(metric)]
    values = values[row : row + 1] if own else np.delete(values, row, axis=0)
    ramp = round(200 / fleet.period)
    return np.nanmedian(values[:, begin + ramp : end]) / np.nanmedian(values[:, :begin])


def test_simulate_repeats_a_seed():
    settings = Synchronous("mild", machines=(4, 8))
    one, same, other = (simulate(settings, seed).fleet for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.values, same.values)
    assert one.values.shape != other.values.shape or not np.array_equal(one.values, other.values)
    assert (np.nan_to_num(one.values) >= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_others_lose_tensor_activity_and_keep_their_duty_cycle(seed):
    settings = Synchronous("severe", machines=(8, 16), period=5)
    incident = simulate(settings, seed)
    assert incident.fault in FAULTS
    assert change(incident, "tensor_core_activity", own=False) < 0.9
    # The levels of two states differ by another 6 % (standard deviation) in each cluster.
    assert change(incident, "gpu_duty_cycle", own=False) > 0.85
    assert change(incident, "gpu_power_draw", own=False) > 0.6


@pytest.mark.slow
def test_assessment_counts_a_severe_fault_as_found_and_a_healthy_fleet_as_silent():
    rows = [examine(300.0, job) for job in ((0, "severe"), (3000, None))]
    assert rows[0]["watch"] == "found" and rows[0]["replay"] == "found"
    assert rows[1]["false"] == []
    lines = summary(rows)
    assert lines[1].split()[:5] == ["severe", "watch", "1", "1", "0"]
    assert "watch 0 false alarms" in lines[-1]
