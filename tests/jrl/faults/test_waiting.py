"""Faults for which all machines wait: the others spin, lose activity, and the machine is named."""

import numpy as np
import pytest

from jrl.faults.collect.fleet import Fleet
from jrl.faults.pauses import Grid, Work, middle_mean, step_seconds
from jrl.faults.shift import ShiftDetector, changes_level
from jrl.faults.standard import StandardDetector

GPU = ("gpu_duty_cycle", "gpu_power_draw", "graphics_engine_activity", "tensor_core_activity")
WORKING = np.array([98.0, 640.0, 95.0, 52.0])
SICK = np.array([60.0, 330.0, 55.0, 18.0])
GRID = Grid.from_seconds(1.0, window=30, hop=10, continuity=240, recent=60)


def fleet_of(values, metrics=GPU, period=1.0, noise=0.02):
    """A fleet with relative noise on ``[machine, metric, time]`` values."""
    random = np.random.default_rng(0)
    values = values * (1 + noise * random.standard_normal(values.shape))
    names = tuple(f"m{row}" for row in range(len(values)))
    return Fleet(names, metrics, 0.0, period, values.astype(np.float32))


def waiting(tensor, power):
    """Half an hour of 16 machines; at 900 s machine 3 slows and the others wait for it."""
    values = np.tile(WORKING[None, :, None], (16, 1, 1800))
    values[:, 1, 900:], values[:, 3, 900:] = power, tensor
    values[3, :, 900:] = SICK[:, None]
    return fleet_of(values)


@pytest.mark.parametrize("power", [640, 420])
@pytest.mark.parametrize("tensor", [50, 34, 30, 25, 18, 10, 5])
def test_detector_names_the_machine_that_all_wait_for(tensor, power):
    (alarm,) = StandardDetector()(waiting(tensor, power))
    assert alarm.machine == "m3" and alarm.start == pytest.approx(900, abs=45)


def test_work_keeps_the_windows_of_a_fault():
    work = Work.find(waiting(5, 420), GRID)
    assert work.windows.tolist() == list(range(GRID.count(1800)))
    assert not work.same.all()


def stepping(step, machines=12, seconds=1800, period=1):
    """Steps of which the first 60 % compute; in the rest machines spin."""
    time = np.arange(0, seconds, period)
    computing = time % step < 0.6 * step
    levels = np.where(computing, np.array([[98], [640], [95], [60]]), [[99], [350], [94], [1]])
    return np.tile(levels[None].astype(float), (machines, 1, 1)), computing


@pytest.mark.parametrize("period", [1, 5])
@pytest.mark.parametrize("step", [50, 75, 110])
def test_step_seconds_finds_the_length_of_long_steps(step, period):
    fleet = fleet_of(stepping(step, period=period)[0], period=float(period))
    assert step_seconds(fleet, 120, 30) == pytest.approx(step, abs=period)


@pytest.mark.parametrize("step", [3, 10, 1e9])
def test_step_seconds_is_zero_if_windows_do_not_alternate(step):
    assert step_seconds(fleet_of(stepping(step)[0]), 120, 30) == 0


@pytest.mark.parametrize("step", [40, 60, 100])
def test_detector_names_a_machine_in_long_steps(step):
    values, computing = stepping(step)
    assert StandardDetector()(fleet_of(values)) == []
    # Only its computation draws less power.
    values[7, 1, 900:] *= np.where(computing[900:], 0.9, 1.0)
    (alarm,) = StandardDetector()(fleet_of(values))
    assert (alarm.machine, alarm.metric) == ("m7", "gpu_power_draw")


@pytest.mark.parametrize("begin", [0, 400, 900])
def test_detector_names_no_machine_for_an_evaluation(begin):
    values = np.tile(WORKING[None, :, None], (16, 1, 1800))
    values[5] *= 1.15  # in training and not in the evaluation
    values[5, 0] /= 1.15
    values[:, :, begin : begin + 500] = np.array([88, 400, 72, 22.0])[:, None]
    assert StandardDetector()(fleet_of(values)) == []


def test_detector_compares_ratios_if_the_level_of_a_metric_changes():
    levels = np.ones((12, 1, 1500))
    levels[4] = 1.75
    levels[:, :, :600] *= 0.2
    packets = fleet_of(100 * levels, ("network/in",))
    assert changes_level(packets.values[:, 0], GRID, np.arange(GRID.count(1500)))
    assert ShiftDetector()(packets) == []
    packets.values[6, 0, 900:] *= 2
    assert [alarm.machine for alarm in ShiftDetector()(packets)] == ["m6"]


def test_middle_mean_leaves_out_the_outer_quarters():
    ordered = np.array([[[0, 1, 2, 3, 4, 5, 6, 1e6], [1, 2, 3, 4, 9, np.nan, np.nan, np.nan]]])
    np.testing.assert_allclose(middle_mean(ordered), [[3.5, 3.0]])
    assert np.isnan(middle_mean(np.full((1, 1, 4), np.nan))).all()
