import os
import signal
import subprocess
import sys

import pytest

from jrl.runs import records
from jrl.runs.folder import RunFolder

CONFIG = {"task": "sort", "seed": 3, "clip": {"low": 0.2, "dual": None}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "sort"


def test_configuration_round_trips(path):
    with RunFolder.create(path, CONFIG) as folder:
        assert folder.config() == CONFIG
    assert RunFolder.read(path).config() == CONFIG


def test_change_config_is_kept(path):
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


def test_create_refuses_a_file(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="is a file"):
        RunFolder.create(tmp_path / "run", CONFIG)


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://bucket/run", "s3:/bucket/run"])
def test_an_address_in_object_storage_is_no_folder(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"run folder {address} is an address in object storage"):
        RunFolder.create(address, {})
    assert not list(tmp_path.iterdir())


def test_a_creation_killed_before_its_configuration_can_be_repeated(path):
    path.mkdir(parents=True)
    (path / ".lock").touch()
    (path / "config.json.tmp").write_text('{"task"')
    RunFolder.create(path, CONFIG).close()
    assert RunFolder.read(path).config() == CONFIG


@pytest.mark.parametrize("open_run", [RunFolder.resume, RunFolder.read])
def test_resume_without_a_run_is_refused(path, open_run):
    with pytest.raises(ValueError, match=r"holds no run \(config.json is missing\)"):
        open_run(path)


def test_a_configuration_that_json_cannot_hold_leaves_nothing(path):
    with pytest.raises(ValueError, match="config cannot be written as JSON"):
        RunFolder.create(path, {"clip": float("inf")})
    assert not path.exists()


def write_steps(folder, *steps):
    for file in (folder.metrics_path, folder.samples_path):
        with records.Appender(file) as appender:
            for step in steps:
                appender.append(step, {})


def test_rewind_cuts_metrics_and_samples(path):
    with RunFolder.create(path, CONFIG) as folder:
        write_steps(folder, 0, 1, 2)
        marks = folder.line_offsets()
        write_steps(folder, 3, 4)
        folder.rewind(2, marks)
        for file in (folder.metrics_path, folder.samples_path):
            assert [record["step"] for record in records.read(file)] == [0, 1, 2]


def test_discard_unsaved_starts_over(path):
    with RunFolder.create(path, CONFIG) as folder:
        folder.discard_unsaved()
        write_steps(folder, 0)
        with folder.metrics_path.open("ab") as file:
            file.write(b'{"step"')  # killed while it wrote
        folder.discard_unsaved()
        assert not folder.metrics_path.exists() and not folder.samples_path.exists()


def test_a_run_whose_checkpoints_are_lost_does_not_begin_again(path):
    with RunFolder.create(path, CONFIG) as folder:
        write_steps(folder, 0, 1)
        with pytest.raises(ValueError, match=r"goes up to step 1 and there is no checkpoint in "):
            folder.discard_unsaved()
        assert len(records.read(folder.metrics_path)) == 2


def test_check_files_refuses_a_changed_tokenizer(path):
    with RunFolder.create(path, CONFIG) as folder:
        folder.tokenizer_path.write_bytes(b"pieces")
        marks = folder.file_hashes()
        folder.check_files(3, marks)
        folder.tokenizer_path.write_bytes(b"Pieces")
        with pytest.raises(ValueError, match=r"tokenizer\.model is not what it was .* of step 3"):
            folder.check_files(3, marks)


def test_a_configuration_nested_too_deeply_is_one_error(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"run": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match=r"config\.json is not JSON: .*recursion.*put the file"):
        RunFolder.read(path).config()


def test_two_writers_are_refused_in_one_process(path):
    with (
        RunFolder.create(path, CONFIG),
        pytest.raises(ValueError, match=rf"written by another process \(pid {os.getpid()}\)"),
    ):
        RunFolder.resume(path)
    RunFolder.resume(path).close()


@pytest.mark.slow
def test_the_lock_ends_with_a_killed_process(path):
    program = (
        "import sys, time; from jrl.runs.folder import RunFolder;"
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


def test_the_recipe_of_a_user_is_never_written_over(tmp_path):
    (tmp_path / "recipe.py").write_bytes(b"mine")
    for recipe in (None, b"another"):
        with pytest.raises(ValueError, match="holds files but no run"):
            RunFolder.create(tmp_path, {}, recipe)
    assert (tmp_path / "recipe.py").read_bytes() == b"mine"
    # What a kill before config.json leaves is the very recipe that is to be written.
    with RunFolder.create(tmp_path, {}, b"mine") as folder:
        assert folder.recipe_path.read_bytes() == b"mine"
