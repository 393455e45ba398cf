"""Replay: a simulated fleet, the record of real processes, an answer of Prometheus."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.simulate.incident import main as simulate_command
from jrl.faults.collect.fleet import Fleet
from jrl.faults.collect.record import Writer
from jrl.faults.collect.vocabulary import exported_name
from jrl.faults.minder.detect import Minder
from jrl.faults.outlier import OutlierDetector
from jrl.faults.replay import find_stopped, read_fleet
from jrl.faults.replay import main as replay
from jrl.faults.standard import StandardDetector
from jrl.faults.watch import main as watch


@pytest.mark.slow
def test_a_simulated_fleet_is_replayed(tmp_path, capsys):
    path = tmp_path / "fleet.npz"
    simulate_command([str(path), "--machines", "6", "--seed", "1", "--difficulty", "0.5"])
    told = capsys.readouterr().out
    assert replay([str(path)]) == 0
    printed = capsys.readouterr().out
    machine = next(word for word in told.split() if word.startswith("machine-"))
    assert f"ALARM: {machine} stands out" in printed
    assert path.with_suffix(".png").stat().st_size > 20_000
    simulate_command([str(path), "--machines", "6", "--seed", "1", "--clean"])
    assert replay([str(path)]) == 0
    assert "no alarm" in capsys.readouterr().out


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "fleet.npz"
    simulate_command([str(path), "--machines", "3", "--seconds", "60"])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="damaged"):
        replay([str(path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no records .* run that was started with --faults"):
        replay([str(tmp_path / "empty")])


def test_a_step_time_that_is_off_by_a_factor_is_replayed(tmp_path, capsys):
    values = np.ones((4, 1, 40), np.float32)
    values[2, 0, 15:] = 5
    path = tmp_path / "fleet.npz"
    Fleet(("a", "b", "c", "d"), ("step/time",), 0.0, 1.0, values).save(path)
    assert replay([str(path), "--detector", "outlier", "--continuity", "10"]) == 0
    assert "ALARM: c stands out in step/time since" in capsys.readouterr().out


def test_models_without_minder_are_refused(tmp_path):
    path = tmp_path / "fleet.npz"
    Fleet((), (), 0.0).save(path)
    for main, words in ((replay, [str(path)]), (watch, ["--scrape", "http://localhost:1"])):
        with pytest.raises(ValueError, match=r"models='m\.npz' needs --detector minder: give it"):
            main([*words, "--models", "m.npz"])


RECORDED = Path(__file__).parent / "recorded" / "local_clean.npz"
"""Five and a half minutes of four healthy local processes on two cores that eleven others use."""


def recorded_run(folder, slow=None, until=None):
    """The recording as the sampler wrote it, one process slowed, or the first gone early."""
    fleet = Fleet.load(RECORDED)
    for row, machine in enumerate(fleet.machines):
        writer = Writer(folder / "faults", machine, fleet.metrics, begun=fleet.start)
        for at, time in enumerate(fleet.times[: until if row == 0 else None]):
            sample = dict(zip(fleet.metrics, fleet.values[row, :, at].tolist(), strict=True))
            if machine == slow and at > 30:
                sample["step/time"] *= 4
            writer.append(time, sample)
        if until is None or row:
            writer.close(fleet.end)


@pytest.mark.slow
def test_the_run_of_healthy_processes_raises_nothing(tmp_path, capsys):
    recorded_run(tmp_path)
    assert replay([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "4 machines, 10 metrics, 331 s" in printed
    assert "no alarm" in printed and "memory/process" not in printed
    fleet, _ = read_fleet(tmp_path)
    np.testing.assert_array_equal(fleet.values, Fleet.load(RECORDED).values)
    # Not even with a continuity of seconds, at the default thresholds.
    for detector in (
        Minder(continuity=30),
        StandardDetector(),
        OutlierDetector(),
        OutlierDetector(continuity=8),
    ):
        assert detector(fleet) == []


def test_a_slow_process_among_them_is_named(tmp_path, capsys):
    recorded_run(tmp_path, slow="host-2")
    assert replay([str(tmp_path)]) == 0
    assert "ALARM: host-2 stands out in step/time" in capsys.readouterr().out
    fleet, _ = read_fleet(tmp_path)
    assert [alarm.machine for alarm in OutlierDetector()(fleet)] == ["host-2"]


def test_a_process_that_was_gone_before_the_end_is_said(tmp_path):
    recorded_run(tmp_path, until=200)
    fleet, notes = read_fleet(tmp_path)
    assert fleet.machines == ("host-1", "host-2", "host-3")
    assert notes == ["process 'host-0' is not compared: silent."]
    (alarm,) = find_stopped(tmp_path)
    assert (alarm.machine, alarm.metric) == ("host-0", "silence")
    assert alarm.end - alarm.start == pytest.approx(131, abs=2)


@pytest.mark.slow
def test_a_fleet_that_cannot_be_compared_is_no_all_clear(tmp_path, capsys):
    path = tmp_path / "fleet.npz"
    simulate_command([str(path), "--machines", "2", "--seconds", "300"])
    assert replay([str(path)]) == 4
    assert "nothing could be compared: no verdict" in capsys.readouterr().out


@pytest.mark.slow
def test_an_answer_of_prometheus_is_replayed(tmp_path, capsys):
    """The recording under the names and in the form in which Prometheus gives it."""
    fleet = Fleet.load(RECORDED)
    result = [
        {
            "metric": {"__name__": exported_name(metric), "machine": machine},
            "values": [[t, str(v)] for t, v in zip(fleet.times.tolist(), row, strict=True)],
        }
        for machine, rows in zip(fleet.machines, fleet.values.tolist(), strict=True)
        for metric, row in zip(fleet.metrics, rows, strict=True)
    ]
    for series in result:
        if series["metric"] == {"__name__": "jrl_step_time", "machine": "host-1"}:
            series["values"] = [[t, str(4 * float(v))] for t, v in series["values"]]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answer))
    assert replay([str(path)]) == 0
    assert "ALARM: host-1 stands out in jrl_step_time" in capsys.readouterr().out
    assert path.with_suffix(".png").stat().st_size > 20_000
