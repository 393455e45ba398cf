"""A healthy run is not touched, and what touches one is told."""

import json

import pytest

from campaign.faults import clean
from campaign.faults.attempt import End
from jrl.faults.collect.fleet import Alarm
from jrl.faults.guard import Drainer

ENDED = End(0, (), True)


def write_metrics(run, *lines):
    run.mkdir(exist_ok=True)
    numbered = ({"step": step} | line for step, line in enumerate(lines))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in numbered))


def test_an_untouched_run_has_no_line(tmp_path):
    write_metrics(tmp_path, {}, {"reward": 1.0}, {"reward": 0.5})
    (tmp_path / "faults").mkdir()
    assert clean.outcome(tmp_path, [ENDED] * 4, 4) == clean.Outcome(2, 0, [])


def test_alarms_drains_warnings_and_ends_touch_a_run(tmp_path):
    write_metrics(tmp_path, {}, {f"{clean.ALARM}vm-2/step/time": 17.0})
    drainer = Drainer(tmp_path, 4, 60.0)
    drainer.consider([Alarm("vm-2", "step/time", 17.0, 30.0, {})], None)
    drainer.write(1)
    ends = [ENDED, ENDED, End(75, (), True), End(0, ("warning: process 3 waits",), True)]
    assert clean.outcome(tmp_path, ends, 3).touched == [
        "alarm vm-2/step/time",
        "drained process 2",
        "1 of 4 processes ended early",
        "process 2: status 75 ",
        "process 3: status 0 warning: process 3 waits",
    ]


def test_too_few_processes_are_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        clean.main(["--processes", "2"])
    assert "--processes 2: the detector compares at least 3" in capsys.readouterr().err


@pytest.mark.slow
def test_half_a_minute_of_four_processes(tmp_path, capsys):
    assert clean.main(["--minutes=0.5", "--reward-seconds=0.1", "--keep", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("4 processes of smallest, 0.5 minutes: ")
    assert line.endswith(" samples of each process; untouched")
