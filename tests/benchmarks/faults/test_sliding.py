"""Looks one after the other: their starts, and how many false alarms they raise."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.faults.__main__ import main as faults_main
from benchmarks.faults.outcomes import most_events
from benchmarks.faults.simulate.operation import Operation, Schedule, simulate_operation
from benchmarks.faults.sliding import looks, main
from jrl.faults import pauses
from jrl.faults.standard import StandardDetector
from jrl.faults.watcher import AlarmTracker

HOUR = Operation(machines=24, hours=1, schedule=Schedule((600.0, 20.0)))


def raised(fleet, detector):
    """Alarms of an hour of looks, as `watch` makes them with a record of 15 minutes."""
    tracker = AlarmTracker(detector)
    return [alarm for record in looks(fleet, 900, 60) for alarm in tracker.update(record)[1]]


def test_a_look_is_the_last_of_a_record_that_grows():
    fleet = replace(simulate_operation(replace(HOUR, machines=3), 0)[0], start=0.0)
    records = list(looks(fleet, 900, 120))
    assert [record.end for record in records] == list(range(120, 3601, 120))
    assert [record.start for record in records[:9]] == [0.0] * 7 + [60.0, 180.0]
    np.testing.assert_array_equal(records[-1].values, fleet.values[:, :, -60:])


def test_the_most_events_that_agree_with_a_count():
    # Half the 95 % quantiles of chi-squared with 2, 4 and 22 degrees of freedom.
    assert [most_events(n) for n in (0, 1, 10)] == pytest.approx([2.996, 4.744, 16.962], abs=1e-3)


@pytest.mark.slow
def test_checkpoints_alarm_a_detector_that_takes_them_for_the_past_and_not_the_default(monkeypatch):
    fleet, _ = simulate_operation(HOUR, 5)
    assert raised(fleet, StandardDetector()) == []
    monkeypatch.setattr(
        pauses, "_most_below", lambda shares, limit: np.zeros(shares.shape[1], bool)
    )
    monkeypatch.setattr(pauses, "_most_frequent", lambda levels, working: working)
    assert len(raised(fleet, StandardDetector(past=0.0))) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_hours_of_any_schedule_raise_no_alarm(seed):
    fleet, _ = simulate_operation(replace(HOUR, machines=64, hours=3, schedule=None), seed)
    tracker, compared = AlarmTracker(StandardDetector()), 0
    for record in looks(fleet, 1800, 120):
        report, alarms = tracker.update(record)
        assert alarms == ()
        compared += report.comparable
    assert compared > 30


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    flags = "--hours 1 --stretch 1 --machines 12 --interval 300 --incidents 1 --processes 1"
    assert main([*flags.split(), "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "sliding.json").read_text())
    assert results["looks"] == 12 and results["false_alarms"] == 0
    assert results["false_alarms_per_day_at_most"] == pytest.approx(24 * 2.996, abs=0.01)
    assert results["outcomes"] == {"found": 1, "wrong": 0, "silent": 0}
    printed = capsys.readouterr().out
    assert "0 false alarms in 1 hours of 12 machines (12 looks" in printed
    assert "1 of 1 faults found" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stretch 0", "hours=24.0 and incidents=0 must be at least 0, and stretch=0.0 above 0."),
        ("--period 4000", "seconds=1800.0 at least period=4000"),
        ("--seed -1", "seed=-1 must lie in 0..4294967295."),
    ],
)
def test_options_that_cannot_be_are_refused(flags, message, capsys):
    assert faults_main(["sliding", *flags.split()]) == 2
    assert message in capsys.readouterr().err
