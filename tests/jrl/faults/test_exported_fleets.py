"""Recorded answers of a sound cluster, with what exporters do to them: nobody is named for it."""

import json

import numpy as np
import pytest

from jrl.faults.collect.fleet import Fleet
from jrl.faults.remote.exporters import build_fleet
from jrl.faults.remote.series import Series
from jrl.faults.replay import main as replay
from jrl.faults.standard import SILENCE, StandardDetector

MACHINES, GPUS, TICKS, PERIOD, BEGIN = 12, 2, 64, 15.0, 1.8e9
LEVELS = {
    "DCGM_FI_DEV_GPU_UTIL": 90.0,
    "DCGM_FI_DEV_POWER_USAGE": 600.0,
    "DCGM_FI_DEV_GPU_TEMP": 60.0,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.5,
    "DCGM_FI_DEV_XID_ERRORS": 0.0,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0.0,
}
TIMES = BEGIN + PERIOD * np.arange(TICKS)
BLANKS = (2147483632, 2147483634, 9223372036854775792, 9223372036854775794, 140737488355328)


def cluster():
    """(machine, GPU, name) -> readings of twelve sound machines with two GPUs each."""
    random = np.random.default_rng(0)
    return {
        (f"n{machine:02}", gpu, name): np.float64(
            level * random.normal(1, 0.02, TICKS).clip(0.9, 1.1)
        )
        for machine in range(MACHINES)
        for gpu in range(GPUS)
        for name, level in LEVELS.items()
    }


def series_of(readings):
    return [
        Series(
            {
                "__name__": name,
                "instance": f"{machine}:9400",
                "gpu": str(gpu),
                "UUID": f"GPU-{machine}-{gpu}",
            },
            TIMES,
            values,
        )
        for (machine, gpu, name), values in readings.items()
    ]


def examined(readings, **settings):
    return StandardDetector(**settings).examine(build_fleet(series_of(readings)))


def test_the_sound_cluster_and_one_with_a_fault():
    readings = cluster()
    assert examined(readings).alarms == [] and examined(readings).comparable
    readings["n04", 0, "DCGM_FI_DEV_POWER_USAGE"][30:] *= 0.7
    assert [alarm.machine for alarm in examined(readings).alarms] == ["n04"]


BLANK = list(zip(LEVELS, (*BLANKS, BLANKS[0]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sentinel"), BLANK, ids=list(LEVELS))
def test_a_blank_names_nobody(name, sentinel):
    for ticks in (slice(25, None), slice(None)):
        readings = cluster()
        readings["n04", 0, name][ticks] = sentinel
        report = examined(readings)
        assert report.alarms == [] and report.comparable
        (note,) = (note for note in report.notes if "invalid readings" in note)
        assert "of n04 has invalid readings: left out" in note
    for machine in range(MACHINES):
        readings[f"n{machine:02}", 0, name][25:] = sentinel
    report = examined(readings)
    assert report.alarms == []
    assert any("of 12 machines has invalid readings" in each for each in report.notes)


def test_a_fault_beside_a_blank_is_named():
    readings = cluster()
    readings["n04", 0, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"][10:] = BLANKS[-1]
    readings["n07", 1, "DCGM_FI_DEV_POWER_USAGE"][30:] *= 0.7
    assert [alarm.machine for alarm in examined(readings).alarms] == ["n07"]


def test_a_gpu_of_which_all_is_blank_is_silent():
    readings = cluster()
    for name in LEVELS:
        readings["n04", 0, name][30:] = BLANKS[1]
    (alarm,) = examined(readings).alarms
    assert alarm.machine == "n04" and alarm.metric.startswith("gpu0/")
    assert alarm.evidence[SILENCE] == 1
    for name in LEVELS:
        readings["n04", 1, name][30:] = BLANKS[1]
    (alarm,) = examined(readings).alarms
    assert (alarm.machine, alarm.metric) == ("n04", SILENCE)


def test_fleet_save_keeps_blanks(tmp_path):
    readings = cluster()
    readings["n04", 0, "DCGM_FI_DEV_GPU_TEMP"][30:] = BLANKS[0]
    fleet = build_fleet(series_of(readings))
    fleet.save(tmp_path / "fleet.npz")
    again = Fleet.load(tmp_path / "fleet.npz")
    assert again.blank == fleet.blank == {("n04", "gpu0/temperature")}
    assert StandardDetector()(again) == []


def test_a_restart_that_numbers_gpus_anew_and_moves_the_address_names_nobody():
    readings = cluster()
    readings["n04", 1, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"][:] = 7  # old errors
    before, after = [], []
    for one in series_of(readings):
        labels, half = one.labels, TICKS // 2
        if labels["instance"] == "n04:9400":
            other = {"instance": "n99:9400", "gpu": str(1 - int(labels["gpu"]))}
            before.append(Series(labels, one.times[:half], one.values[:half]))
            after.append(Series({**labels, **other}, one.times[half:], one.values[half:]))
        else:
            before.append(one)
    fleet = build_fleet([*before, *after])
    assert "n99" in fleet.machines and "n04" not in fleet.machines
    assert len(fleet.machines) == MACHINES and StandardDetector()(fleet) == []


def answer_of(readings, *extra):
    result = [
        {
            "metric": dict(one.labels),
            "values": [[t, str(v)] for t, v in zip(TIMES, one.values, strict=True)],
        }
        for one in series_of(readings)
    ]
    return json.dumps(
        {"status": "success", "data": {"resultType": "matrix", "result": [*result, *extra]}}
    )


@pytest.mark.slow
def test_replay_notes_unknown_metrics_and_program_errors(tmp_path, capsys):
    readings = cluster()
    readings["n02", 0, "DCGM_FI_DEV_XID_ERRORS"][30:] = 31
    unknown = [
        {"metric": {"__name__": name, "instance": "n01:9400", "gpu": gpu}, "values": [[BEGIN, "1"]]}
        for name in ("DCGM_FI_DEV_DEC_UTIL", "DCGM_FI_DEV_FB_FREE")
        for gpu in "01"
    ]
    path = tmp_path / "answer.json"
    path.write_text(answer_of(readings, *unknown))
    assert replay([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "no alarm" in printed
    assert "2 metrics of exporters are unknown and not compared: DCGM_FI_DEV_DEC" in printed
    said = "XID 31 (memory page fault, an illegal address; usually a program fault) on n02"
    assert said in printed
    (alarm,) = examined(readings, codes=("machine", "program")).alarms
    assert "n02 stands out in gpu0/xid with XID 31 (memory page" in alarm.describe()
    readings["n02", 0, "DCGM_FI_DEV_XID_ERRORS"][31:] = 79
    (alarm,) = examined(readings).alarms
    said = (
        "n02 stands out in gpu0/xid with XID 79 (GPU has fallen off the bus; machine fault) since"
    )
    assert alarm.describe().startswith(said)
