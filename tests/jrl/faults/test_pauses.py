"""Pauses of all machines: they are not compared, and nothing that differs permanently is new."""

import numpy as np
import pytest

from jrl.faults import shift
from jrl.faults.collect.fleet import Fleet
from jrl.faults.pauses import Grid, Work
from jrl.faults.shift import ShiftDetector

METRICS = ("gpu0/duty_cycle", "gpu0/power", "gpu0/tensor_activity", "cpu/process")
LEVELS = np.array([95.0, 600.0, 0.5, 0.4])[:, None]
GRID = Grid.from_seconds(1.0, window=30, hop=10, continuity=240, recent=60)


def working(work, machines=12, metrics=METRICS, seed=0):
    """A fleet whose work is a number for each metric and second; machine 3 draws 5 % more."""
    random = np.random.default_rng(seed)
    work = np.broadcast_to(work, (len(metrics), np.shape(work)[-1]))
    values = work * LEVELS[: len(metrics)]
    values = values * (1 + 0.01 * random.standard_normal((machines, *values.shape)))
    values[3, 1 % len(metrics)] *= 1.05
    names = tuple(f"m{row}" for row in range(machines))
    return Fleet(names, metrics, 0.0, 1.0, values.astype(np.float32))


def activity(seconds, **pauses):
    """Work of all metrics: 1, and 0.05 between the seconds of each pause."""
    work = np.ones(seconds)
    for begin, end in pauses.values():
        work[begin:end] = 0.05
    return work


def same_work(fleet, grid):
    """Windows of the most frequent work."""
    work = Work.find(fleet, grid)
    return work.windows[work.same]


class AllSame(Work):
    """All windows, as if the fleet never paused."""

    @classmethod
    def find(cls, fleet, grid):
        count = grid.count(fleet.num_samples)
        return cls(np.arange(count), np.ones(count, bool))


@pytest.mark.parametrize("pause", [(0, 60), (0, 500)])
def test_a_record_that_begins_in_a_pause_names_no_machine_for_a_lasting_difference(pause):
    assert ShiftDetector()(working(activity(900, first=pause))) == []


def test_without_the_rule_the_machine_is_named(monkeypatch):
    monkeypatch.setattr(shift, "Work", AllSame)
    (alarm,) = ShiftDetector()(working(activity(900, first=(0, 60))))
    assert (alarm.machine, alarm.metric) == ("m3", "gpu0/power")


def test_a_fault_between_pauses_is_named():
    fleet = working(activity(900, first=(0, 30), second=(500, 530)))
    fleet.values[7, 2, 400:] *= 0.8
    (alarm,) = ShiftDetector(past=240)(fleet)
    assert (alarm.machine, alarm.metric) == ("m7", "gpu0/tensor_activity")
    assert alarm.start == pytest.approx(400, abs=40)


def pause_score(begin, end):
    """Score of a shift of 5 % from `begin` on, with a pause from 500 s to `end`."""
    fleet = working(activity(1200, pause=(500, end)))
    fleet.values[7, 2, begin:] *= 0.95
    (alarm,) = ShiftDetector()(fleet)
    assert alarm.machine == "m7"
    return alarm.evidence["score"]


def test_shift_detector_divides_the_score_across_a_long_pause():
    across = pause_score(500, 590)
    # The windows of 110 s are left out; the first 60 s of them do not count.
    assert across / pause_score(500, 520) == pytest.approx(1 / (1 + 50 / 240), rel=0.05)
    # A burst before a drift that goes on in the pause looks like it.
    assert pause_score(450, 590) == pytest.approx(across, rel=0.05)


def test_windows_of_a_pause_are_left_out():
    windows = same_work(working(activity(600, one=(200, 220), two=(400, 404))), GRID)
    # A quarter of a window is 8 of 30 samples.
    assert np.setdiff1d(np.arange(GRID.count(600)), windows).tolist() == [18, 19, 20, 21]


def test_of_two_kinds_of_work_the_more_frequent_is_compared():
    work = np.ones((4, 1800))
    for begin in range(0, 1800, 300):  # rollouts: less tensor activity and power, all else alike
        work[2, begin : begin + 180] = 0.3
        work[1, begin : begin + 180] = 0.6
    begins = 10 * same_work(working(work), GRID)
    assert len(begins) > 80
    assert (begins % 300 + 30 <= 180 + 30 / 2).all()
    work[1:3] = 1.3 - work[1:3]  # and the other way round: training for 180 of 300 s
    assert (10 * same_work(working(work), GRID) % 300 <= 180).all()


def test_a_restart_ends_the_past():
    begins = 10 * same_work(working(activity(1200, restart=(300, 450))), GRID)
    assert begins.min() == pytest.approx(450 + 60, abs=20) and begins.max() == 1170
    # Other roles, and with them other permanent differences, are no shift.
    fleet = working(activity(1200, restart=(300, 450)))
    fleet.values[8, 2, 450:] *= 0.9
    assert ShiftDetector()(fleet) == []


@pytest.mark.parametrize("metrics", [("network/in",), ("step/time", "network/pfc")])
def test_without_activity_all_windows_are_compared(metrics):
    fleet = working(activity(600, first=(0, 200)), metrics=metrics)
    assert same_work(fleet, GRID).tolist() == list(range(GRID.count(600)))


def test_cpu_usage_is_the_activity_without_gpus():
    fleet = working(activity(600, first=(0, 100)), metrics=("cpu/process",), machines=4)
    assert 10 * same_work(fleet, GRID).min() == pytest.approx(100, abs=20)


def test_shift_detector_has_no_verdict_on_a_long_pause():
    report = ShiftDetector().examine(working(activity(600, long=(100, 560))))
    assert not report.comparable and "too short a time" in report.notes[0]
