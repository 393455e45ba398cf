"""Drains: which alarm ends a run, and the evidence that it leaves."""

import json
import time
from dataclasses import replace

import numpy as np

from jrl.faults.collect.fleet import Alarm, Fleet
from jrl.faults.guard import Drainer, Restart, process_of, read_drains

SCORES = np.array([0.5, np.nan, 7.0], np.float32)
ALARM = Alarm("node-7-2", "cpu/process", 100.0, 160.0, {"score": 7.0, "scores": SCORES})
FLEET = Fleet(("node-7-2",), ("cpu/process",), 100.0, values=np.ones((1, 1, 60), np.float32))
RESTART = Restart((0, 1, 3), ("--layout", "dp3"), "dp3")


def drained(folder, **settings):
    """Drainer of a run of four processes that has considered the alarm."""
    drainer = Drainer(folder, **{"num_processes": 4, "every": 3600.0, **settings})
    return drainer, drainer.consider([ALARM, replace(ALARM, machine="other-0")], FLEET)


def test_a_process_is_named_by_its_index():
    assert [process_of(name) for name in ("node-7-2", "a-0", "a", "a-b", "")] == [2, 0, -1, -1, -1]


def test_the_first_alarm_drains_the_run_and_its_evidence_is_kept(tmp_path):
    asked = []
    drainer, line = drained(tmp_path, plan=lambda process: asked.append(process) or RESTART)
    assert line is None and drainer.requested and asked == [2]
    assert read_drains(tmp_path) == []  # until the checkpoint is saved
    line = drainer.write(12)
    path = tmp_path / "faults" / "drain-1.json"
    assert line.startswith("drained node-7-2 after step 12: node-7-2 stands out in cpu/process")
    assert line.endswith(f"evidence: {path}")
    [drain] = read_drains(tmp_path)
    assert (drain.number, drain.step, drain.num_processes, drain.process) == (1, 12, 4, 2)
    assert drain.restart == RESTART and abs(drain.time - time.time()) < 60
    assert drain.alarm["evidence"] == {"score": 7.0, "scores": [0.5, "NaN", 7.0]}
    assert (drain.alarm["start"], drain.alarm["line"]) == (100.0, ALARM.describe())
    assert Fleet.load(path.with_suffix(".npz")).machines == FLEET.machines


def test_without_an_alarm_nothing_is_drained(tmp_path):
    drainer = Drainer(tmp_path, 4, 3600.0)
    assert drainer.consider([], None) is None and not drainer.requested


def test_a_second_drain_waits_for_its_time(tmp_path):
    drained(tmp_path)[0].write(3)
    drainer, line = drained(tmp_path)
    assert not drainer.requested and "is not drained, the run continues with it: the last" in line
    assert "drain_every=3600 allows one in that many seconds." in line
    path = tmp_path / "faults" / "drain-1.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"time": content["time"] - 3700}))
    drainer, line = drained(tmp_path)
    assert line is None
    drainer.write(9)
    assert [drain.number for drain in read_drains(tmp_path)] == [1, 2]


def test_drainer_tells_reason_against_a_drain(tmp_path):
    def no_layout(process):
        raise ValueError("no layout is legal.")

    for settings, reason in (
        ({"num_processes": 2}, "it is no process of this run."),
        ({"plan": no_layout}, "no layout is legal."),
    ):
        drainer, line = drained(tmp_path, **settings)
        assert not drainer.requested
        assert line == f"node-7-2 is not drained, the run continues with it: {reason}"
    (tmp_path / "faults").mkdir()
    for text in ("{", "[]", "{}", '{"restart": null, "step": 3}'):
        (tmp_path / "faults" / "drain-3.json").write_text(text)
        drainer, line = drained(tmp_path)
        assert not drainer.requested and "drain-3.json" in line and "delete it" in line
