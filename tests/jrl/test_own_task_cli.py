"""A run on a task of the user's own and a mixture: its parts are metrics, and it goes on and is
evaluated with the files that it began with."""

import json

import pytest
from command_runs import FLAGS, metrics, one_line

from jrl import evaluate, train
from jrl.config.flags import parse_arguments
from jrl.train import main

SOURCE = """
class make:
    prompts = [{"prompt": f"{n:02d}=", "answer": f"{n:02d}"[::-1]} for n in range(40)]
    weights = {"right": 1.0, "first": 0.5}

    def reward(self, prompt, completion, *, answer):
        if not completion:
            raise ValueError("nothing to judge")
        return {"right": completion == answer, "first": completion[:1] == answer[:1]}
"""
# Sampling ahead carries verdicts, with their parts, from one step to another and over a resumption.
COMMAND = ["--task", "2 own.py:make + sort", *FLAGS, "--eval-every", "1", "--max-staleness", "2"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(SOURCE)


@pytest.mark.slow
def test_it_trains_goes_on_and_is_evaluated(tmp_path, capsys):
    assert main([*COMMAND, "--run-dir", "whole"]) == 0
    (copy,) = (tmp_path / "whole" / "code").iterdir()
    assert copy.read_text() == SOURCE
    lines = metrics(tmp_path / "whole")
    for line in lines[1:]:
        assert 0 <= line["reward/right"] <= line["reward/first"] <= 1
        own, sort = (line[f"task/{name}/completions"] for name in ("own.py:make", "sort"))
        assert own + sort == 16 and own in (8, 12)
        assert line["verifier/not_finite"] == line["verifier/timeout"] == 0
    assert all(0 <= line["val/task/own.py:make/accuracy/greedy"] <= 1 for line in lines)
    # A run that has begun keeps to its copy.
    assert main([*COMMAND, "--steps", "1", "--run-dir", "parts"]) == 0
    (tmp_path / "own.py").write_text("1 / 0")
    assert main(["--resume", "--run-dir", "parts", "--steps", "2"]) == 0
    assert metrics(tmp_path / "parts") == lines
    numbers = evaluated("parts")
    assert numbers["task/own.py:make/completions/sampled"] == 3
    assert {"reward/right", "reward/first", "task/sort/accuracy/sampled"} <= set(numbers)
    # Any other task, of the characters that the run's tokenizer has.
    (tmp_path / "own.py").write_text(SOURCE.replace("range(40)", "range(60, 80)"))
    other = evaluated("parts", "--task", "own.py:make", "--held-out", "5")
    assert (other["task"], other["prompts"]) == ("own.py:make", 5)
    capsys.readouterr()
    assert evaluate.main(["parts", "--task", "countdown"]) == 2
    assert "tokenizer" in one_line(capsys.readouterr())
    copy = tmp_path / "parts" / "code" / copy.name
    copy.write_text(SOURCE + "\n")
    assert main(["--resume", "--run-dir", "parts", "--steps", "3"]) == 2
    assert f"{copy.name} is not what it was at the checkpoint" in capsys.readouterr().err


def evaluated(run, *flags):
    where = ["--k", "1", "--prompts", "5", "--json", "numbers.json"]
    assert evaluate.main([run, *where, *flags]) == 0
    with open("numbers.json") as file:
        return json.load(file)


def test_settings_are_judged_before_anything_starts(capsys):
    for flags, message in (
        (["--reward-weights", "a"], "reward_weights='a' is not a weight"),
        (["--held-out", "2.5"], "held_out=2.5 must be a share"),
        (["--task", "own.py:other"], "own.py:other does not make a task"),
        (["--task", "own.py:make", "--reward", "absent.py:f"], "absent.py cannot be read"),
    ):
        assert main([*flags, *FLAGS, "--run-dir", "never"]) == 2
        assert message in one_line(capsys.readouterr())


def test_processes_must_have_the_same_files(tmp_path):
    command = ["--task", "own.py:make", *FLAGS]
    before = train._shared_settings(parse_arguments(command))
    (tmp_path / "own.py").write_text(SOURCE.replace("0.5", "0.25"))
    after = train._shared_settings(parse_arguments(command))
    assert [name for name in before if before[name] != after[name]] == [
        "the files of task and rewards"
    ]
