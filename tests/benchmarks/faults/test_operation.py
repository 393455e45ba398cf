"""Healthy hours: what a phase does to all machines, and how machines differ."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.faults.simulate.operation import SIGNALS, Operation, Schedule, simulate_operation

QUIET = Operation(
    machines=12, hours=0.5, disturbances=0, drifts=0, missing=0, schedule=Schedule((600.0, 60.0))
)
COLUMN = {signal.name: column for column, signal in enumerate(SIGNALS)}


def within(fleet, phases, name):
    """True on the samples that lie in a phase, and on those that touch none."""
    begin = fleet.times - fleet.start
    inside, touched = np.zeros(len(begin), bool), np.zeros(len(begin), bool)
    for phase, first, last in phases:
        touched |= (begin + fleet.period > first) & (begin < last + 70)
        if phase == name:
            inside |= (begin >= first + 10) & (begin + fleet.period <= last - 15)
    return inside, ~touched


def test_a_seed_gives_the_same_values_and_another_does_not():
    settings = replace(QUIET, schedule=None, disturbances=1, drifts=0.5, missing=0.01)
    (one, phases), (same, _), (other, _) = (
        simulate_operation(settings, seed) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(one.values, same.values)
    assert not np.array_equal(one.values, other.values, equal_nan=True)
    assert one.num_samples == 120 and one.metrics == tuple(COLUMN)
    assert 0.002 < np.isnan(one.values[:, 0]).mean() < 0.03
    assert all(first < last for _, first, last in phases)


def test_all_machines_pause_in_a_checkpoint_and_differ_while_they_work():
    fleet, phases = simulate_operation(replace(QUIET, hours=1, offsets=5), 1)
    inside, outside = within(fleet, phases, "checkpoint")
    assert inside.sum() >= 3 and outside.sum() > 60
    power = fleet.values[:, COLUMN["gpu_power_draw"]]
    assert (power[:, inside] < 200).all() and (power[:, outside].mean(axis=1) > 400).all()
    spread = [np.std(power[:, each].mean(axis=1)) for each in (inside, outside)]
    assert spread[1] > 20 > 5 > spread[0]


def test_evaluations_and_rollouts_have_levels_of_their_own():
    schedule = Schedule((0.0, 0.0), evaluation=(900.0, 300.0))
    fleet, phases = simulate_operation(replace(QUIET, hours=1, schedule=schedule), 2)
    inside, outside = within(fleet, phases, "evaluation")
    tensor = np.median(fleet.values[:, COLUMN["tensor_core_activity"]], axis=0)
    share = tensor[inside].mean() / tensor[outside].mean()
    assert share == pytest.approx(0.45, abs=0.05)
    schedule = Schedule((0.0, 0.0), rollout=(200.0, 300.0))
    fleet, phases = simulate_operation(replace(QUIET, hours=1, schedule=schedule), 2)
    share = np.mean([name == "rollout" for name, _, _ in phases])
    lengths = np.array([last - first for _, first, last in phases])
    assert share == 1 and lengths == pytest.approx(200, rel=0.11)
    assert len(phases) == pytest.approx(3600 / 500, abs=1.5)


@pytest.mark.slow
def test_a_restart_stops_all_and_can_change_their_roles():
    schedule = Schedule((0.0, 0.0), restart=(1500.0, 200.0))
    settings = replace(QUIET, machines=32, hours=2, schedule=schedule, offsets=20)
    changed = []
    for seed in range(6):
        fleet, phases = simulate_operation(settings, seed)
        inside, _ = within(fleet, phases, "restart")
        activity = fleet.values[:, COLUMN["graphics_engine_activity"]]
        assert len(phases) > 0 and (activity[:, inside] < 10).all()
        cpu = fleet.values[:, COLUMN["cpu_usage"]]
        first, last = round(phases[0][1] / 15), round((phases[0][2] + 90) / 15)
        if first > 4:
            before, after = cpu[:, :first].mean(axis=1), cpu[:, last : last + 20].mean(axis=1)
            changed.append(bool(np.abs(before - after).max() > 20))
    assert True in changed and False in changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machines": 2}, "machines=2 must be at least 3"),
        ({"hours": 0}, "hours=0 must be a finite number above 0"),
        ({"offsets": -1}, "offsets=-1 must be at least 0"),
        ({"missing": 1}, r"missing=1 must lie in \[0, 0.99\]"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(QUIET, **changes)
