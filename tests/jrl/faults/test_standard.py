"""What runs by default: errors, silence, step times and shifts, each machine once."""

import numpy as np
import pytest

from jrl.faults.collect.fleet import Fleet
from jrl.faults.standard import SILENCE, SilenceDetector, StandardDetector

STANDARD = StandardDetector()
METRICS = ("cpu/process", "gpu0/duty_cycle", "gpu0/power", "step/time")


def host(processes=8, seconds=900, seed=0, metrics=METRICS):
    """One host whose processes sample a GPU each and share the time of a step."""
    random = np.random.default_rng(seed)
    level = np.array([1.0, 0.9, 350.0, 2.0])[: len(metrics), None]
    noise = random.normal(1, 0.05, (processes, len(metrics), seconds))
    values = (level * noise).astype(np.float32)
    if "step/time" in metrics:
        values[:, -1] = values[:1, -1]
    names = tuple(f"node-{i}" for i in range(processes))
    return Fleet(names, metrics, 5000.0, 1.0, values)


def test_one_gpu_of_a_host_of_eight_processes_that_drops_is_named():
    healthy = host()
    assert STANDARD(healthy) == []
    healthy.values[5, 1:3, 400:] *= 0.8
    (alarm,) = STANDARD(healthy)
    assert alarm.machine == "node-5" and alarm.metric.startswith("gpu0/")
    assert alarm.start == pytest.approx(5400, abs=40)


def test_a_slowdown_at_the_beginning_of_a_record_makes_no_lasting_difference_new():
    fleet = host(seconds=1200)
    fleet.values[5, 2] *= 1.3
    fleet.values[5, 2, 75:225] *= 0.8
    assert STANDARD(fleet) == []
    (alarm,) = StandardDetector(past=240)(fleet)
    assert (alarm.machine, alarm.metric) == ("node-5", "gpu0/power")


@pytest.mark.parametrize("gap", [(300, 660), (540, 900), (0, 900)])
def test_a_machine_that_is_silent_for_six_of_fifteen_minutes_is_named(gap):
    fleet = host()
    fleet.values[2, :, slice(*gap)] = np.nan
    (alarm,) = STANDARD(fleet)
    assert (alarm.machine, alarm.metric) == ("node-2", SILENCE)
    assert (alarm.start, alarm.end) == (5000 + gap[0], 5000 + gap[1])
    assert alarm.evidence["seconds"] == gap[1] - gap[0]


def test_who_comes_late_or_pauses_with_all_others_is_not_silent():
    fleet = host()
    fleet.values[2, :, :400] = np.nan
    fleet.values[:, :, 500:800] = np.nan
    assert SilenceDetector()(fleet) == []


def test_a_metric_that_one_machine_gives_no_more_is_named():
    fleet = host()
    fleet.values[4, 2, 500:] = np.nan
    fleet.values[6, 0] = np.nan  # never had it
    (alarm,) = SilenceDetector()(fleet)
    assert (alarm.machine, alarm.metric, alarm.start) == ("node-4", "gpu0/power", 5500)


def test_a_counter_of_fatal_errors_that_moves_names_at_once():
    fleet = host(metrics=("cpu/process", "gpu1/xid", "gpu1/ecc/uncorrected"), seconds=60)
    fleet.values[:, 1:] = 0
    fleet.values[:, 2] = 7  # old errors are no news
    assert STANDARD(fleet) == []
    fleet.values[3, 1, 50:] = 79
    (alarm,) = STANDARD(fleet)
    assert (alarm.machine, alarm.metric, alarm.start) == ("node-3", "gpu1/xid", 5050)
    assert alarm.cause == "XID 79 (GPU has fallen off the bus; machine fault)"
    assert alarm.evidence["code before"] == 0
    # If it made all others fail, the first is the cause.
    fleet.values[:, 1, 55:] = 43
    assert [each.machine for each in STANDARD(fleet)] == ["node-3"]


def test_moved_counters_evidence_has_counts_before_and_after():
    fleet = host(metrics=("gpu0/ecc/uncorrected",), seconds=60)
    fleet.values[:] = 7
    fleet.values[3, 0, 50:] = 8
    (alarm,) = STANDARD(fleet)
    assert (alarm.machine, alarm.start, alarm.cause) == ("node-3", 5050, "")
    assert (alarm.evidence["before"], alarm.evidence["after"]) == (7, 8)


def with_codes(codes, machine=3):
    """Sixty seconds in which one machine has had these codes, one for each ten."""
    fleet = host(metrics=("cpu/process", "gpu1/xid"), seconds=60)
    fleet.values[:, 1] = 0
    for number, code in enumerate(codes):
        fleet.values[machine, 1, 10 * (number + 1) :] = code
    return fleet


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 92, 8, 39, 137, 777])
def test_an_error_that_is_not_the_machines_is_said_and_names_nobody(code):
    report = STANDARD.examine(with_codes([code]))
    assert report.alarms == []
    (note,) = (note for note in report.notes if "XID" in note)
    assert note.startswith(f"XID {code} (") and "on node-3: no machine is named for it" in note


@pytest.mark.parametrize("code", [32, 48, 62, 64, 74, 79, 94, 95, 109, 119, 140, 149, 154])
def test_an_error_of_the_machine_names_it_at_once(code):
    (alarm,) = STANDARD(with_codes([code]))
    assert (alarm.machine, alarm.metric, alarm.start) == ("node-3", "gpu1/xid", 5010)
    assert f"in gpu1/xid with XID {code} (" in alarm.describe()


@pytest.mark.parametrize(
    ("codes", "at"),
    [([31, 79], 20), ([79, 45], 10), ([0, 13, 0, 48, 43], 40), ([63, 64], 20), ([95, 0, 95], 10)],
)
def test_the_first_error_of_the_machine_counts_among_others(codes, at):
    (alarm,) = STANDARD(with_codes(codes))
    assert (alarm.machine, alarm.start) == ("node-3", 5000 + at)


def test_whose_errors_name_a_machine_can_be_chosen():
    fleet = with_codes([31])
    assert [each.machine for each in StandardDetector(codes=("program",))(fleet)] == ["node-3"]
    assert StandardDetector(codes=("unknown",))(fleet) == []
    with pytest.raises(ValueError, match="codes='driver' must be some of machine, program"):
        StandardDetector(codes=("driver",))


def test_a_program_that_fails_on_all_machines_is_one_line():
    fleet = with_codes([31])
    fleet.values[:, 1, 20:] = 31
    report = STANDARD.examine(fleet)
    assert report.alarms == []
    assert sum("31 (memory page fault" in note for note in report.notes) == 1
    assert any("on 8 machines" in note for note in report.notes)


def test_errors_that_are_corrected_are_evidence_of_an_alarm():
    fleet = host(metrics=("cpu/process", "gpu0/duty_cycle", "gpu0/nvlink/errors"))
    fleet.values[:, 2] = 0
    fleet.values[1, 2, 450:] = 3
    fleet.values[1, 1, 400:] *= 0.7
    (alarm,) = STANDARD(fleet)
    assert alarm.machine == "node-1"
    assert alarm.evidence["gpu0/nvlink/errors"] == pytest.approx(1.5)


def test_standard_detector_says_when_nothing_is_comparable():
    report = STANDARD.examine(host(2))
    assert not report.comparable and "two cannot tell" in report.notes[0]
    # A step time is compared in less than four minutes.
    assert StandardDetector(continuity=20).examine(host(seconds=60)).comparable
