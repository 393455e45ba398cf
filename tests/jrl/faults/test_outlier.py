"""The detector without training: it names who is off by a factor for long enough, nobody else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.faults.collect.fleet import Fleet
from jrl.faults.outlier import OutlierDetector

SHORT = OutlierDetector(window=4, continuity=10)


def fleet(machines: int = 4, time: int = 60, seed: int = 0, metrics=("step/time",)) -> Fleet:
    random = np.random.default_rng(seed)
    shape = (machines, len(metrics), time)
    values = np.exp(random.normal(0, 0.07, shape)).astype(np.float32)
    return Fleet(tuple(f"m{i}" for i in range(machines)), metrics, 1000.0, 1.0, values)


@pytest.mark.parametrize("machines", [3, 4, 50])
@pytest.mark.parametrize("factor", [4.0, 0.2])
def test_a_machine_that_is_off_by_a_factor_is_named_with_its_beginning(machines, factor):
    sick = fleet(machines)
    sick.values[2, 0, 30:] *= factor
    (alarm,) = SHORT(sick)
    assert (alarm.machine, alarm.metric) == ("m2", "step/time")
    assert 1030 <= alarm.start <= 1034 and alarm.evidence["score"] > 4
    assert 1059 <= alarm.end <= 1060


def test_outlier_detector_needs_continuity():
    for seconds, named in ((7, False), (20, True)):
        sick = fleet()
        sick.values[1, 0, 20 : 20 + seconds] *= 5
        assert bool(SHORT(sick)) == named


def test_it_compares_where_a_machine_that_is_off_throughout_is_named():
    for time in (12, 13, 14, 40):
        sick = fleet(time=time)
        sick.values[1] *= 5
        assert SHORT.compares(sick) == bool(SHORT(sick)) == (time >= 13)
    assert not SHORT.compares(fleet(machines=2))


def test_of_a_machine_the_later_alarm_counts():
    sick = fleet(5, time=90)
    for machine, begin in ((3, 0), (1, 30), (3, 60)):
        sick.values[machine, 0, begin : begin + 20] *= 6
    starts = {alarm.machine: alarm.start for alarm in SHORT(sick)}
    assert starts.keys() == {"m1", "m3"} and starts["m1"] < starts["m3"]


@pytest.mark.parametrize("worse", [1, 3])
def test_the_alarm_with_the_greatest_score_comes_first(worse):
    """As `Detector` promises: whichever of the two was named first in time."""
    sick = fleet(5, time=60)
    for machine, begin in ((3, 0), (1, 30)):
        sick.values[machine, 0, begin : begin + 20] *= 20 if machine == worse else 4
    alarms = SHORT(sick)
    assert [alarm.machine for alarm in alarms] == [f"m{worse}", f"m{4 - worse}"]
    assert alarms[0].evidence["score"] > alarms[1].evidence["score"]


def test_two_that_take_turns_are_not_named():
    sick = fleet(5)
    for begin in range(0, 60, 8):
        sick.values[begin // 8 % 2, 0, begin : begin + 8] *= 6
    assert SHORT(sick) == []


def test_all_slowed_together_name_nobody():
    sick = fleet()
    sick.values[:, :, 20:] *= 10
    assert SHORT(sick) == []


def test_the_first_metric_that_names_somebody_ends_the_search():
    sick = fleet(metrics=("cpu/process", "step/time"))
    sick.values[0, 0, 20:] *= 0.1
    sick.values[3, 1, 20:] *= 5
    assert [alarm.machine for alarm in SHORT(sick)] == ["m3"]
    assert [alarm.machine for alarm in SHORT(sick.select(["cpu/process"]))] == ["m0"]


def bad(kind: str, seed: int) -> Fleet:
    """A healthy fleet with something wrong in what was recorded."""
    random = np.random.default_rng(seed)
    made = fleet(5, seed=seed)
    values = made.values
    if kind == "a machine without data":
        values[1] = np.nan
    elif kind == "nothing at all":
        values[:] = np.nan
    elif kind == "constant":
        values[:] = 3.0
    elif kind == "zero":
        values[:] = 0.0
    elif kind == "gaps":
        values[random.random(values.shape) < 0.4] = np.nan
    elif kind == "a long gap":
        values[2, 0, 10:50] = np.nan
    elif kind == "two machines":
        values[2:] = np.nan
        values[1] *= 10
    elif kind == "single wild samples":
        values[random.random(values.shape) < 0.03] = 1e30
    return made


KINDS = [
    "a machine without data",
    "nothing at all",
    "constant",
    "zero",
    "gaps",
    "a long gap",
    "two machines",
    "single wild samples",
]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_bad_input_names_nobody(kind, seed):
    assert SHORT(bad(kind, seed)) == []


def test_two_that_are_left_of_three_are_not_compared():
    values = fleet(3).values[:, 0].astype(np.float64)
    values[1, 20:] = np.nan
    scores = SHORT.scores(values, 1.0)
    assert np.isfinite(scores[:, :20]).all() and np.isnan(scores[:, 20:]).all()


@pytest.mark.parametrize("shape", [(0, 1, 0), (4, 1, 0), (4, 1, 3), (1, 1, 60), (4, 0, 60)])
def test_a_fleet_too_small_to_compare_names_nobody(shape):
    machines, metrics = (tuple(f"{n}" for n in range(size)) for size in shape[:2])
    detector = OutlierDetector(metrics=("0",), window=4, continuity=10)
    assert detector(Fleet(machines, metrics, 0.0, 1.0, np.ones(shape, np.float32))) == []


@pytest.mark.parametrize("name", ["window", "continuity", "threshold", "resolution"])
def test_settings_that_cannot_be_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}=0\.0 must be"):
        OutlierDetector(**{name: 0.0})
