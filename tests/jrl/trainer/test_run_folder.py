import os
import signal
import subprocess
import sys

import pytest

from jrl.trainer import records
from jrl.trainer.run_folder import RunFolder

CONFIG = {"task": "sort", "seed": 3, "clip": {"low": 0.2, "dual": None}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "sort"


def test_configuration_round_trips(path):
    with RunFolder.create(path, CONFIG) as folder:
        assert folder.config() == CONFIG
    assert RunFolder.read(path).config() == CONFIG


def test_a_changed_configuration_stays(path):
    with RunFolder.create(path, CONFIG) as folder:
        folder.change_config({**CONFIG, "steps": 7})
    assert RunFolder.read(path).config() == {**CONFIG, "steps": 7}


def test_an_existing_run_is_refused_with_the_fix(path):
    RunFolder.create(path, CONFIG).close()
    with pytest.raises(ValueError, match=r"already holds a run: .*--resume.*--run-dir"):
        RunFolder.create(path, {})
    assert RunFolder.read(path).config() == CONFIG


def test_a_folder_of_other_files_is_refused_and_left_alone(path):
    path.mkdir(parents=True)
    (path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds files but no run"):
        RunFolder.create(path, CONFIG)
    assert [entry.name for entry in path.iterdir()] == ["thesis.tex"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.create(tmp_path / "run", CONFIG)


def test_a_creation_killed_before_its_configuration_can_be_repeated(path):
    path.mkdir(parents=True)
    (path / ".lock").touch()
    (path / "config.json.tmp").write_text('{"task"')
    RunFolder.create(path, CONFIG).close()
    assert RunFolder.read(path).config() == CONFIG


@pytest.mark.parametrize("open_run", [RunFolder.resume, RunFolder.read])
def test_no_run_to_continue(path, open_run):
    with pytest.raises(ValueError, match=r"holds no run \(config.json is missing\)"):
        open_run(path)


def test_a_configuration_that_json_cannot_hold_leaves_nothing(path):
    with pytest.raises(ValueError, match="config cannot be written as JSON"):
        RunFolder.create(path, {"clip": float("inf")})
    assert not path.exists()


def test_going_back_cuts_metrics_and_samples(path):
    with RunFolder.create(path, CONFIG) as folder:
        for file in (folder.metrics_path, folder.samples_path):
            with records.Appender(file) as appender:
                for step in range(5):
                    appender.append(step, {})
        folder.go_back(2)
        for file in (folder.metrics_path, folder.samples_path):
            assert [record["step"] for record in records.read(file)] == [0, 1, 2]


def test_two_writers_are_refused_in_one_process(path):
    with (
        RunFolder.create(path, CONFIG),
        pytest.raises(ValueError, match=rf"written by another process \(pid {os.getpid()}\)"),
    ):
        RunFolder.resume(path)
    RunFolder.resume(path).close()


def test_the_lock_ends_with_a_killed_process(path):
    program = (
        "import sys, time; from jrl.trainer.run_folder import RunFolder;"
        "folder = RunFolder.create(sys.argv[1], {}); print('ready', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            with pytest.raises(ValueError, match=rf"\(pid {writer.pid}\)"):
                RunFolder.resume(path)
            assert RunFolder.read(path).config() == {}
        finally:
            writer.send_signal(signal.SIGKILL)
    RunFolder.resume(path).close()
