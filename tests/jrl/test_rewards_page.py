"""The page "Your own reward": its file trains and is evaluated as the page says."""

import json
import re

import pytest
from command_runs import FLAGS, metrics
from places import ROOT

from jrl import evaluate
from jrl.config.flags import parse_arguments
from jrl.tasks import load_task
from jrl.train import main

PAGE = (ROOT / "docs" / "rewards.md").read_text()
PATH = PAGE[: PAGE.index("\n## ")]
FILES = re.findall(r'(?ms)^```python title="(.*?)"\n(.*?)^```', PAGE)
TRAIN = re.findall(r"(?m)^python -m jrl.train (.*)$", PAGE)
EVALUATE = re.findall(r"(?m)^python -m jrl.evaluate (.*)$", PATH)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, source in FILES:
        (tmp_path / name).write_text(source)


def test_the_path_is_short():
    assert len(PATH.splitlines()) <= 40
    assert [name for name, _ in FILES] == ["mirror.py", "brevity.py"]


@pytest.mark.slow
def test_from_a_reward_to_a_curve(tmp_path, pictures, capsys):
    assert main([*TRAIN[0].split(), *FLAGS]) == 0
    (evaluation,) = EVALUATE
    assert evaluate.main([*evaluation.split()[:1], "--k", "2", "--prompts", "4"]) == 0
    assert "reward: letters" in capsys.readouterr().out
    run = tmp_path / "runs" / "mirror"
    assert (run / "plots" / "overview.png").is_file()
    assert all({"reward/letters", "reward/length"} <= line.keys() for line in metrics(run)[1:])
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert sample["score"] == pytest.approx(
        sample["rewards"]["letters"] + 0.2 * sample["rewards"]["length"]
    )


def test_several_rewards():
    run = parse_arguments(TRAIN[1].split()).run
    task = load_task(run.task, run.seed, workers=1, rewards=run.rewards)
    example = task.train(0)
    (verdict,) = task.verify([example], [example.answer])
    task.close()
    assert verdict.parts == (("task", 1.0), ("brevity", -0.08))
    assert verdict.score == 1 + 0.1 * -0.08 and verdict.correct
