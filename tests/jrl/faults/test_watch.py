"""The command: what it shows, whom it names, how it ends; and the watcher behind it."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from jrl.faults import __main__ as faults_command
from jrl.faults.__main__ import main
from jrl.faults.collect.fleet import Alarm, Fleet
from jrl.faults.collect.record import Writer
from jrl.faults.outlier import OutlierDetector
from jrl.faults.standard import SILENCE
from jrl.faults.watcher import Watcher, command_hook

COLUMNS = ("step/time", "cpu/process")
FAST = ["--once", "--window=4", "--continuity=10"]


def recorded(run, sick: str | None = None, machines: int = 4, seconds: int = 40, until=0.0):
    """A run whose processes have sampled until now, one of them four times slower."""
    (run / "faults").mkdir(parents=True, exist_ok=True)
    now = time.time() + until
    writers = []
    for number in range(machines):
        name = f"host-{number}"
        writer = Writer(run / "faults", name, COLUMNS, begun=now - seconds)
        for second in range(seconds):
            factor = 4.0 if name == sick else 1.0
            values = {"step/time": 0.5 * factor, "cpu/process": 0.9 / factor}
            writer.append(now - seconds + 1 + second, values)
        writers.append(writer)
    return writers


def test_a_clean_run_names_nobody(tmp_path, capsys):
    recorded(tmp_path)
    assert main(["watch", str(tmp_path), *FAST]) == 0
    output = capsys.readouterr().out
    assert "no process stands out" in output and "host-3" in output and "ALARM" not in output


def test_the_slow_one_is_named_the_hook_called_and_the_fleet_kept(tmp_path, capfd):
    recorded(tmp_path, sick="host-1")
    hook = f'printf "%s|" "$JRL_FAULT_MACHINE" "$JRL_FAULT_METRIC" > "{tmp_path}/hook"'
    kept = tmp_path / "fleet.npz"
    arguments = [str(tmp_path), *FAST, f"--on-fault={hook}", f"--save={kept}"]
    assert main(["watch", *arguments]) == 3
    output = " ".join(capfd.readouterr().out.split())
    assert "ALARM: host-1 stands out in step/time since" in output and "2 (4.0)" in output
    assert (tmp_path / "hook").read_text() == "host-1|step/time|"
    fleet = Fleet.load(kept)
    assert [a.machine for a in OutlierDetector(window=4, continuity=10)(fleet)] == ["host-1"]


def test_the_metrics_asked_for_are_those_compared(tmp_path, capsys):
    recorded(tmp_path, sick="host-1")
    assert main(["watch", str(tmp_path), *FAST, "--metrics", "cpu/process"]) == 3
    assert main(["watch", str(tmp_path), *FAST, "--metrics", "disk/read"]) == 4
    assert "stands out in cpu/process" in capsys.readouterr().out


def test_minder_watches_too_when_asked_for(tmp_path, capsys):
    arguments = ["watch", str(tmp_path), "--once", "--detector=minder", "--continuity=20"]
    recorded(tmp_path, sick="host-1", seconds=60)
    assert main([*arguments, "--threshold=1000"]) == 0
    assert main(arguments) == 3
    output = " ".join(capsys.readouterr().out.split())
    assert "ALARM: host-1 stands out in cpu/process since" in output
    assert main([*arguments, "--metrics", "step/time"]) == 3
    assert "ALARM: host-1 stands out in step/time since" in " ".join(
        capsys.readouterr().out.split()
    )


def test_runs_of_one_process_are_compared_as_one_fleet(tmp_path, capsys):
    for number in range(4):
        recorded(tmp_path / f"run-{number}", "host-0" if number == 2 else None, machines=1)
    runs = [str(tmp_path / f"run-{number}") for number in range(4)]
    assert main(["watch", *runs, *FAST]) == 3
    assert "ALARM: run-2/host-0 stands out" in " ".join(capsys.readouterr().out.split())


def test_lines_instead_of_a_table_where_there_is_no_terminal(tmp_path, capsys):
    for writer in recorded(tmp_path, until=-1.0):
        writer.close(time.time())
    assert main(["watch", str(tmp_path), "--interval=0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"host-{number}: ended" for number in range(4)]


def test_watch_says_unreadable_and_incomparable_records(tmp_path, capsys):
    recorded(tmp_path, sick="host-1", machines=2)
    early = Writer(tmp_path / "faults", "early", COLUMNS, begun=time.time())
    early.append(time.time() + 3600, {"step/time": 9.0})
    (tmp_path / "faults" / "host-9.1.samples").write_bytes(b"rubbish, but long enough")
    assert main(["watch", str(tmp_path), *FAST]) == 4
    output = "".join(capsys.readouterr().out.split())  # a narrow terminal breaks lines anywhere
    assert "fewerthanthreeprocessesarerunning:nonecanbecompared" in output
    assert "clockahead" in output and "host-9.1.samplesisnotarecord" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wach"], "command 'wach' is unknown: choose among watch"),
        (["watch"], "give the folder of a run"),
        (["watch", "nowhere"], "holds no run"),
        (["watch", "{run}", "--interval=0"], "interval=0.0 must be above 0"),
        (["watch", "{run}", "--continuity=-1"], "continuity=-1.0 must be"),
        (["watch", "{run}", "{run}"], "two of the runs are called"),
        (["watch", "{run}", "--on-fault= "], "on_fault is an empty command"),
        (["watch", "{run}", "--on-fault=drain"], "on_fault='drain' is an action of a run"),
    ],
)
def test_watch_refuses_wrong_input_in_one_line(tmp_path, capsys, arguments, message):
    recorded(tmp_path, machines=1)
    assert main([each.replace("{run}", str(tmp_path)) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_run_without_samples_says_how_to_get_them(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["watch", str(tmp_path), "--once"]) == 2
    assert "holds no samples: start the run with --faults" in capsys.readouterr().err


@pytest.mark.parametrize("detector", ["standard", "outlier", "minder"])
def test_watch_before_first_sample_names_the_folder(tmp_path, capsys, detector):
    (tmp_path / "faults").mkdir()
    arguments = ["watch", str(tmp_path), "--once", f"--detector={detector}"]
    for _ in range(2):
        assert main(arguments) == 4
        output = " ".join(capsys.readouterr().out.split())
        assert "no sample yet in" in output and "a run started with --faults writes" in output
        assert "0 machines" not in output and "fewer than three" not in output
        assert "no process stands out" not in output
        # One that is there and has not sampled.
        Writer(tmp_path / "faults", "host-0", COLUMNS, begun=time.time())
    assert "host-0" in output and "no data" in output


def test_without_a_terminal_it_is_a_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "faults").mkdir()
    looks = []

    def appear(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            for writer in recorded(tmp_path, until=-1.0):
                writer.close(time.time())

    monkeypatch.setattr("jrl.faults.watch.time", SimpleNamespace(sleep=appear))
    assert main(["watch", str(tmp_path)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"no sample yet in {tmp_path / 'faults'}: a run started with --faults")
    assert rest == [f"host-{number}: ended" for number in range(4)]


@pytest.mark.parametrize("detector", ["outlier", "minder"])
def test_two_processes_are_no_all_clear(tmp_path, capsys, detector):
    recorded(tmp_path, machines=2)
    assert main(["watch", str(tmp_path), "--once", f"--detector={detector}"]) == 4
    assert "no process stands out" not in capsys.readouterr().out


def test_a_record_that_is_too_short_for_the_detector_is_no_all_clear(tmp_path, capsys):
    recorded(tmp_path)
    arguments = ["watch", str(tmp_path), "--once", "--detector=outlier"]
    assert main([*arguments, "--continuity=100"]) == 4
    assert "no process stands out" not in capsys.readouterr().out
    assert main([*arguments, "--continuity=10"]) == 0


def test_a_hook_that_fails_is_said(capfd):
    alarm = Alarm("host-0", "step/time", 5.0, 9.0)
    assert command_hook("exit 7")(alarm) == 7
    assert command_hook("sleep 9", timeout=0.05)(alarm) == 124
    assert command_hook("true")(Alarm("a\0b", "step/time", 5.0, 9.0)) == 126
    error = capfd.readouterr().err
    assert "ended with status 7: exit 7" in error and "status 124: sleep 9" in error
    assert "cannot be started: embedded null byte" in error


def watcher(run, **changes):
    detector = OutlierDetector(window=4, continuity=10)
    return Watcher({"": run / "faults"}, detector, **changes)


def test_an_alarm_is_raised_once_and_again_after_it_was_over(tmp_path):
    recorded(tmp_path, sick="host-1")
    now = time.time()
    one = watcher(tmp_path, seconds=60)
    assert [a.machine for a in one.detect(now).raised] == ["host-1"]
    again = one.detect(now + 1)
    assert again.raised == () and [a.machine for a in again.alarms] == ["host-1"]
    assert one.detect(now + 600).alarms == ()  # nobody is running any more
    assert [a.machine for a in one.detect(now).raised] == ["host-1"]


def test_a_process_that_falls_silent_is_named_and_one_that_ends_is_not(tmp_path):
    writers = recorded(tmp_path, machines=4)
    now = time.time()
    writers[1].close(now)
    for second in range(1, 91):
        for each in writers[2:]:
            each.append(now + second, {"step/time": 0.5, "cpu/process": 0.9})
    one = watcher(tmp_path, silence_timeout=60.0)
    assert one.detect(now + 50).alarms == ()
    (alarm,) = one.detect(now + 90).alarms
    assert (alarm.machine, alarm.metric) == ("host-0", SILENCE)
    assert abs(alarm.start - now) < 1.5
    assert watcher(tmp_path, silence_timeout=None).detect(now + 90).alarms == ()


def test_processes_of_an_earlier_life_of_the_run_are_not_missed(tmp_path):
    recorded(tmp_path, machines=4, until=-300.0)
    now = time.time()
    for name in ("host-0", "host-1", "host-2"):
        writer = Writer(tmp_path / "faults", name, COLUMNS, begun=now - 20)
        for second in range(20):
            writer.append(now - 19 + second, {"step/time": 0.5})
    look = watcher(tmp_path).detect(now)
    assert {each.machine: each.state for each in look.processes}["host-3"] == "silent"
    assert look.alarms == ()


def test_the_comparison_begins_when_all_have_samples(tmp_path):
    """Else the gap before a late start would be filled with whatever a detector thinks fit."""
    recorded(tmp_path, machines=2)
    recorded_late = Writer(tmp_path / "faults", "late", COLUMNS, begun=0)
    now = time.time()
    for second in range(5):
        recorded_late.append(now - 4 + second, {"step/time": 0.5, "cpu/process": 0.9})
    fleet = watcher(tmp_path).detect(now).fleet
    assert fleet.machines == ("host-0", "host-1", "late") and fleet.num_samples <= 6
    assert np.isfinite(fleet.values[:, :, 0]).any(axis=1).all()


@pytest.mark.parametrize("command", ["watch", "replay"])
def test_watch_and_replay_use_the_cpu_platform(tmp_path, monkeypatch, command):
    updates = []
    config = SimpleNamespace(update=lambda *change: updates.append(change))
    monkeypatch.setattr(faults_command, "jax", SimpleNamespace(config=config))
    assert main([command, str(tmp_path / "nothing")]) in (1, 2)
    assert updates == [("jax_platforms", "cpu")]


def test_who_is_acknowledged_is_left_out_and_another_can_be_named(tmp_path, capsys):
    recorded(tmp_path, sick="host-1", machines=5)
    known = tmp_path / "known"
    arguments = ["watch", str(tmp_path), *FAST, "--acknowledged", str(known)]
    assert main(arguments) == 3
    known.write_text("host-1\n\n")
    assert main(arguments) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("ALARM") == 1 and "5 of 5 processes are running, read" in output
