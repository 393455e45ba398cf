"""The command that lists, verifies and prunes the checkpoints of a run."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_runs import one_line
from damages import cut_the_last_byte, flip_a_bit

from jrl.runs import __main__ as command
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run with the checkpoints of four steps, of which the last is the largest."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with (
        RunFolder.create(path, {"recipe": "grpo"}) as folder,
        Checkpoints(folder.checkpoints_path, keep=9) as checkpoints,
    ):
        for step in (0, 5, 10, 15):
            checkpoints.save(step, {"w": np.arange(100, dtype=np.float32) + step})
    return path


@pytest.fixture
def run(four, tmp_path, capsys):
    return Path(shutil.copytree(four, tmp_path / "run"))


def data(run, step):
    folder = run / "checkpoints" / str(step) / "state" / "ocdbt.process_0" / "d"
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def steps(run):
    return Checkpoints(run / "checkpoints").steps()


def test_list(run, capsys):
    cut_the_last_byte(data(run, 5))
    flip_a_bit(data(run, 10))  # which only hashes show
    (run / "checkpoints" / "20.writing").mkdir()
    (run / "checkpoints" / "15").rename(run / "checkpoints" / "15.damaged-2")
    assert command.main(["list", str(run)]) == 0
    head, *rows = lines(capsys)
    assert head.split() == ["checkpoint", "size", "written", "state"]
    row = r"step (\d+) +[\d.]+ MB  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)"
    result = [match.groups() for line in rows if (match := re.fullmatch(" *" + row, line))]
    assert len(result) == len(rows) == 5
    assert result[0] == ("0", "complete, hashes not read")
    assert result[1][0] == "5" and re.match(
        r"damaged: state/.* has \d+ bytes instead", result[1][1]
    )
    assert result[2] == ("10", "complete, hashes not read")
    assert result[3] == ("15", "set aside as damaged (15.damaged-2)")
    assert result[4] == ("20", "in flight, or left by a killed run")


@pytest.mark.slow
def test_verify(run, capsys):
    shutil.copytree(run / "checkpoints" / "0", run / "checkpoints" / "base" / "0")
    with RunFolder.resume(run):  # beside the run that writes it
        assert command.main(["verify", str(run)]) == 0
    assert lines(capsys) == [
        f"{name}: intact" for name in ("base weights", "step 0", "step 5", "step 10", "step 15")
    ]
    flip_a_bit(data(run, 10))
    assert command.main(["verify", str(run)]) == 1
    said = lines(capsys)
    assert [line.partition(": ")[2][:7] for line in said] == [*["intact"] * 3, "damaged", "intact"]
    assert said[3].startswith("step 10: damaged: state/ocdbt.process_0/d/")
    assert said[3].endswith("has other content than was written")


def change_setting(run):
    path = run / "config.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.0002', '"learning_rate": 0.1'))


def append(name):
    def change(run):
        with (run / name).open("a") as file:
            file.write(" ")

    return change


def add_code(run):
    (run / "code").mkdir()
    (run / "code" / "more.py").write_text("1 / 0")


def change_line(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1', '"step":  1'))


CHANGES = [
    (None, None),
    (change_setting, "config.json: --learning-rate is 0.1 and was 0.0002, unlike"),
    (append("tokenizer.model"), "tokenizer.model: changed, unlike"),
    (lambda run: (run / "tokenizer.model").unlink(), "tokenizer.model: changed, unlike"),
    (lambda run: (run / "recipe.py").write_text("1 / 0"), "recipe.py: added, unlike"),
    (add_code, "code/more.py: added, unlike"),
    (change_line, "metrics.jsonl: changed in its first lines, unlike"),
    (append("metrics.jsonl"), None),  # as a run in progress does
]
"""Changes of a finished run, and the line that tells each."""


@pytest.mark.parametrize(("change", "line"), CHANGES)
def test_verify_compares_settings_code_and_lines_with_the_checkpoint(
    grpo_run, tmp_path, capsys, change, line
):
    run = Path(shutil.copytree(grpo_run, tmp_path / "run"))
    if change is not None:
        change(run)
    assert command.main(["verify", str(run)]) == (line is not None)
    said = [each for each in lines(capsys) if not each.endswith(": intact")]
    names = {"config.json", "tokenizer.model", "metrics.jsonl", "samples.jsonl"}
    assert names <= {each.partition(":")[0] for each in said}
    assert all(each.endswith(" at the checkpoint of step 2") for each in said)
    changed = [each for each in said if ": as at" not in each]
    assert changed == ([] if line is None else [f"{line} at the checkpoint of step 2"])


def test_prune_keeps_the_newest_that_are_intact(run, capsys):
    flip_a_bit(data(run, 15))
    flip_a_bit(data(run, 0))
    assert command.main(["prune", str(run), "--keep", "2"]) == 0
    assert steps(run) == [5, 10]
    said = lines(capsys)
    assert [line.partition(" (")[0] for line in said] == [
        *("step 0: removed", "step 5: kept", "step 10: kept", "step 15: removed")
    ]
    assert "MB, damaged: state/" in said[3] and "damaged" not in said[0]
    assert command.main(["prune", str(run), "--keep", "9"]) == 0
    assert steps(run) == [5, 10]
    assert command.main(["prune", str(run), "--keep", "1"]) == 0
    assert steps(run) == [10]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["10"]


@pytest.mark.slow
def test_prune_leaves_a_run_that_is_written_and_one_without_an_intact_checkpoint(run, capsys):
    with RunFolder.resume(run):
        assert command.main(["prune", str(run), "--keep", "1"]) == 2
        assert "is being written by another process" in one_line(capsys.readouterr())
    for step in steps(run):
        flip_a_bit(data(run, step))
    assert command.main(["prune", str(run), "--keep", "1"]) == 2
    assert "is intact, and nothing was removed" in one_line(capsys.readouterr())
    assert steps(run) == [0, 5, 10, 15]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prune RUN", "keep=None must be at least 1"),
        ("prune RUN --keep 0", "keep=0 must be at least 1"),
        ("verify RUN --keep 1", "keep=1 is for prune only"),
        ("list NONE", "holds no run"),
        ("list EMPTY", "no checkpoint in "),
        ("verify EMPTY", "no checkpoint in "),
        ("prune EMPTY --keep 1", "no checkpoint in "),
    ],
)
def test_bad_input_is_one_line(arguments, message, four, tmp_path, capsys):
    RunFolder.create(tmp_path / "empty", {"recipe": "grpo"}).close()
    places = {"RUN": four, "NONE": tmp_path / "none", "EMPTY": tmp_path / "empty"}
    words = [str(places.get(word, word)) for word in arguments.split()]
    assert command.main(words) == 2
    assert message in one_line(capsys.readouterr())
