"""What the commands say about a run whose files were damaged: one line each, and the way on."""

import json
import shutil
from pathlib import Path

import pytest
from command_runs import FLAGS, metrics, one_line

from jrl import evaluate, train
from jrl.runs import checkpoints

pytestmark = pytest.mark.slow

AS_TRAINED = ["--k", "1", "--prompts", "8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "run"
    assert train.main([*FLAGS, "--checkpoint-every=1", "--run-dir", str(path)]) == 0
    return path


@pytest.fixture
def copy(run, tmp_path, capsys):
    copied = Path(shutil.copytree(run, tmp_path / "copy"))
    capsys.readouterr()
    return copied


def flip(path, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 0b100
    path.write_bytes(bytes(content))


def array_data(run, step):
    data = (run / "checkpoints" / str(step) / "state" / "ocdbt.process_0" / "d").iterdir()
    return max(data, key=lambda path: path.stat().st_size)


def resume(run, *flags):
    return train.main(["--resume", "--run-dir", str(run), *flags])


def test_a_damaged_checkpoint_gives_way_and_the_run_is_the_same(run, copy, capsys):
    flip(array_data(copy, 2))
    assert evaluate.main([str(copy), *AS_TRAINED, "--json", str(copy / "out.json")]) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"warning: checkpoint {copy}/checkpoints/2 is damaged (state/")
    assert said.err.endswith("has other content than was written); using step 1\n")
    assert json.loads((copy / "out.json").read_text())["step"] == 1
    assert (copy / "checkpoints" / "2").exists()

    assert resume(copy) == 0
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("warning: the checkpoint of step 2 is damaged (state/ocdbt.process_")
    assert said.err.endswith(f"was moved to {copy}/checkpoints/2.damaged; resuming from step 1\n")
    assert metrics(copy) == metrics(run)
    assert (copy / "samples.jsonl").read_bytes() == (run / "samples.jsonl").read_bytes()
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["1", "2", "2.damaged"]
    assert resume(copy) == 0
    assert "is finished after 2 steps" in capsys.readouterr().out


def test_a_full_disk_ends_the_run_in_one_line(run, copy, capsys, monkeypatch):
    write = checkpoints._write_host_arrays

    def full(path, items):
        if path.name.startswith("3"):
            raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")
        write(path, items)

    monkeypatch.setattr(checkpoints, "_write_host_arrays", full)
    # In flight at step 3: the save of step 4 raises it, or the end of the run.
    for steps in (4, 3):
        shutil.rmtree(copy)
        shutil.copytree(run, copy)
        assert resume(copy, f"--steps={steps}") == 1
        line = one_line(capsys.readouterr())
        assert line.startswith(f"error: {copy}/checkpoints: No space left on device: free space on")
        assert line.endswith("step 3 was not written, that of step 2 stays intact.")
    monkeypatch.undo()
    assert resume(copy, "--steps=3") == 0
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["2", "3"]


def test_without_a_whole_checkpoint_both_commands_say_what_can_be_done(copy, capsys):
    for step in (1, 2):
        flip(array_data(copy, step))
    for command in (lambda: resume(copy, "--steps=3"), lambda: evaluate.main([str(copy)])):
        assert command() == 2
        line = one_line(capsys.readouterr())
        assert "/checkpoints is intact (of step 2: state/" in line and "; of step 1: " in line
        assert line.endswith("restore a copy of one, or start a new run in another folder")
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["1", "2"]


def lose(copy):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])


def double(copy):
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1], lines[1], lines[2]]))


def exchange(copy):
    path = copy / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.", "0.1", 1))


def forget_the_kind(copy):
    path = copy / "samples.jsonl"
    path.write_text(path.read_text().replace('"kind"', '"mind"'))


def change_the_seed(copy):
    path = copy / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


def lose_the_checkpoints(copy):
    shutil.rmtree(copy / "checkpoints")


def nest(copy):
    (copy / "config.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose, "metrics.jsonl:2 is of step 2 where step 1 is expected; the checkpoint of step 2"),
        (double, "metrics.jsonl:3 is of step 1 where step 2 is expected; the checkpoint of step 2"),
        (exchange, "bytes were changed, or are those of another run; the checkpoint of step 2"),
        (forget_the_kind, "samples.jsonl: the first "),
        (
            change_the_seed,
            "config.json is not what it was at the checkpoint of step 2: --seed is 1",
        ),
        (lose_the_checkpoints, "metrics.jsonl goes up to step 2 and there is no checkpoint in"),
        (nest, "config.json is not JSON: maximum recursion depth exceeded"),
    ],
)
def test_what_is_not_of_the_run_is_one_line(copy, capsys, damage, message):
    damage(copy)
    before = {path: path.read_bytes() for path in copy.glob("*.jsonl")}
    assert resume(copy, "--steps=3") == 2
    assert message in one_line(capsys.readouterr())
    assert {path: path.read_bytes() for path in copy.glob("*.jsonl")} == before


def test_a_policy_is_not_read_with_another_tokenizer(copy, capsys, tmp_path):
    flip(copy / "tokenizer.model", at=0.1)
    message = "tokenizer.model is not what it was at the checkpoint of step 2: it was changed"
    assert evaluate.main([str(copy), *AS_TRAINED]) == 2
    assert message in one_line(capsys.readouterr())
    assert train.main([*FLAGS, "--weights", str(copy), "--run-dir", str(tmp_path / "new")]) == 2
    assert message in one_line(capsys.readouterr())
    assert resume(copy, "--steps=3") == 2
    assert message in one_line(capsys.readouterr())
