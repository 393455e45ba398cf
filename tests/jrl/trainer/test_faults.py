"""A run that is watched: the same numbers, and an alarm where a run has them."""

import json
import math
import socket
import threading
import time

import numpy as np
import pytest
from small_runs import metrics_of, small_recipe, small_run, small_setup

from jrl.config.run import RunConfig
from jrl.faults.collect.align import read_folder
from jrl.faults.collect.record import Writer
from jrl.faults.guard import machine_name
from jrl.report.metrics import check_defined
from jrl.runs.folder import RunFolder
from jrl.trainer import loop

SLOW = "elsewhere-3"


def neighbours(folder):
    """Three processes that sample for ten minutes from now on, one of them slow."""
    now = time.time()
    for number in range(1, 4):
        name = f"elsewhere-{number}"
        writer = Writer(folder / "faults", name, ["step/time"], begun=now)
        # The sound ones leave room between them for this process on a machine with more to do.
        seconds = 9e5 if name == SLOW else {1: 0.3, 2: 3.0}[number]
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
    # One line has it: that of the step under way, the first where compiling took long.
    assert [each for each in alarms if each] == [{f"faults/alarm/{SLOW}/step/time": alarm.start}]
    assert (tmp_path / "hook").read_text() == f"{SLOW} step/time"
    assert f"ALARM: {SLOW} stands out in step/time" in capfd.readouterr().out
    records, unreadable = read_folder(folder.path / "faults")
    mine = next(each for each in records if each.machine == machine_name(socket.gethostname(), 0))
    assert unreadable == [] and mine.ended and len(mine.times) >= 2
    assert np.nanmax(mine.values[:, mine.columns.index("step/time")]) > 0


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
        ({"faults_port": 9000}, r"faults_port=9000 needs --faults"),
        ({"faults": True, "faults_port": 70000}, r"faults_port=70000 must lie in 1\.\.65535"),
        ({"faults_continuity": math.nan}, "faults_continuity=nan must be above 0"),
        ({"faults_continuity": 0.0}, r"faults_continuity=0\.0 must be above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**changes)
