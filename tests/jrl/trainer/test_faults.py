"""A run that is watched: the same numbers, and an alarm in the metrics of a run."""

import json
import math
import socket
import threading
import time

import numpy as np
import pytest
from small_runs import metrics_of, small_recipe, small_run, small_setup

from jrl.config.run import RunConfig
from jrl.faults.collect.fleet import Alarm, Fleet
from jrl.faults.collect.record import Writer, read_folder
from jrl.faults.guard import machine_name, read_drains
from jrl.report.metrics import check_defined
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.trainer import loop

SLOW = "elsewhere-3"


def neighbours(folder, slow=SLOW):
    """Three processes that sample for ten minutes from now on, one of them slow."""
    now = time.time()
    # The sound ones leave room between them for this process on a machine with more to do.
    for name, seconds in {"elsewhere-1": 0.3, "elsewhere-2": 3.0, slow: 9e5}.items():
        writer = Writer(folder / "faults", name, ["step/time"], begun=now)
        for second in range(600):
            writer.append(now + second, {"step/time": seconds})


@pytest.mark.slow
def test_a_watched_run_has_the_same_numbers_and_shows_who_stands_out(
    finished, tmp_path, monkeypatch, capfd
):
    expected = finished("grpo")
    named, seen = threading.Event(), []
    step = loop.train_step

    def patient_step(sampler, networks, state, *rest, **options):
        """The second step lasts until somebody has been named."""
        assert int(state.step) != 1 or named.wait(60), "nobody was named"
        return step(sampler, networks, state, *rest, **options)

    monkeypatch.setattr(loop, "train_step", patient_step)
    hook = f'printf "%s %s" "$JRL_FAULT_MACHINE" "$JRL_FAULT_METRIC" > "{tmp_path}/hook"'
    run = small_run(faults=True, faults_continuity=1.0, on_fault=hook)
    setup = small_setup(small_recipe("grpo"), run)

    def on_fault(alarm):
        seen.append(alarm)
        named.set()

    with RunFolder.create(tmp_path / "run", {"recipe": "grpo"}) as folder:
        neighbours(folder.path)
        loop.train(setup, folder, on_fault=on_fault)
    assert metrics_of(folder.path) == expected.metrics
    lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    alarms = [{k: v for k, v in line.items() if k.startswith("faults/")} for line in lines]
    (alarm,) = seen
    assert (alarm.machine, alarm.metric) == (SLOW, "step/time")
    # One line has it: the step in progress, or the first if compiling took long.
    assert [each for each in alarms if each] == [{f"faults/alarm/{SLOW}/step/time": alarm.start}]
    assert (tmp_path / "hook").read_text() == f"{SLOW} step/time"
    assert f"ALARM: {SLOW} stands out in step/time" in capfd.readouterr().out
    records, unreadable = read_folder(folder.path / "faults")
    mine = next(each for each in records if each.machine == machine_name(socket.gethostname(), 0))
    assert unreadable == [] and mine.ended and len(mine.times) >= 2
    assert np.nanmax(mine.values[:, mine.columns.index("step/time")]) > 0


@pytest.mark.slow
def test_a_drained_run_saves_stops_and_ends_when_it_is_resumed(finished, tmp_path, monkeypatch):
    expected = finished("grpo")
    named, step = threading.Event(), loop.train_step

    def patient_step(sampler, networks, state, *rest, **options):
        """The second step lasts until somebody has been named."""
        assert int(state.step) != 1 or named.wait(60), "nobody was named"
        return step(sampler, networks, state, *rest, **options)

    monkeypatch.setattr(loop, "train_step", patient_step)
    run = small_run(faults=True, faults_continuity=1.0, on_fault="drain", checkpoint_every=100)
    setup = small_setup(small_recipe("grpo"), run)
    # A process that its run has, on a host of its own.
    with RunFolder.create(tmp_path / "run", {"recipe": "grpo"}) as folder:
        neighbours(folder.path, slow="elsewhere-0")
        first = loop.train(setup, folder, on_fault=lambda alarm: named.set())
        assert (first.step, first.stopped, first.saved) == (2, True, True)
        assert first.drained.startswith("drained elsewhere-0 after step 2: elsewhere-0 stands out")
        assert Checkpoints(folder.checkpoints_path).latest_step() == 2
        [drain] = read_drains(folder.path)
        assert (drain.step, drain.process, drain.alarm["metric"]) == (2, 0, "step/time")
        fleet = Fleet.load(folder.path / "faults" / "drain-1.npz")
        assert "elsewhere-0" in fleet.machines
        second = loop.train(setup, folder)  # an alarm within the hour is told only
        assert (second.step, second.stopped, second.drained) == (run.steps, False, None)
        assert len(read_drains(folder.path)) == 1
    lines = metrics_of(folder.path)
    trained = [{k: v for k, v in line.items() if "faults/" not in k} for line in lines]
    assert trained == expected.metrics


@pytest.mark.slow
def test_an_alarm_that_cannot_drain_is_told(tmp_path, monkeypatch, capfd):
    alarm = Alarm("elsewhere-7", "step/time", 100.0, 200.0)
    monkeypatch.setattr(loop.Guard, "alarms", lambda self: [alarm])
    run = small_run(faults=True, on_fault="drain")
    setup = small_setup(small_recipe("grpo"), run)
    with RunFolder.create(tmp_path / "run", {"recipe": "grpo"}) as folder:
        outcome = loop.train(setup, folder)
    assert (outcome.stopped, outcome.drained) == (False, None)
    reason = "elsewhere-7 is not drained, the run continues with it: it is no process of this run."
    assert reason in " ".join(capfd.readouterr().out.split())


@pytest.mark.slow
def test_a_run_that_is_not_watched_leaves_no_samples(finished):
    folder = finished("grpo").folder
    assert not (folder.path / "faults").exists()
    assert "faults" not in folder.metrics_path.read_text()


def test_the_metric_of_an_alarm_is_in_the_table():
    check_defined(["faults/alarm/host-0/step/time"])
    with pytest.raises(ValueError, match="without a definition"):
        check_defined(["faults/alarm/"])


def test_a_host_is_named_as_a_file_can_be():
    assert machine_name("node7.rack/β", 12) == "node7-rack-12"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_fault": "reboot"}, r"on_fault='reboot' needs --faults"),
        ({"on_fault": "drain"}, r"on_fault='drain' needs --faults"),
        ({"drain_every": 0.0}, r"drain_every=0\.0 must be above 0"),
        ({"faults": True, "on_fault": "drain", "min_processes": 0}, "min_processes=0 must be"),
        (
            {
                **{"faults": True, "on_fault": "drain", "min_processes": 2},
                **{"rollout_devices": 2, "max_staleness": 1},
            },
            "min_processes=2 cannot be combined with --rollout-devices",
        ),
        ({"faults_port": 9000}, r"faults_port=9000 needs --faults"),
        ({"faults": True, "faults_port": 70000}, r"faults_port=70000 must lie in 1\.\.65535"),
        ({"faults_continuity": math.nan}, "faults_continuity=nan must be a finite number"),
        ({"faults_continuity": 0.0}, r"faults_continuity=0\.0 must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**changes)
