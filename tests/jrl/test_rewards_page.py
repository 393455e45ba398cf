"""The page "Your own reward": its file trains and is evaluated as the page says."""

import json
import re

import pytest
from command_runs import FLAGS, metrics
from places import ROOT

from jrl import evaluate
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
def test_from_a_reward_to_a_curve(tmp_path, capsys):
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


@pytest.mark.slow
def test_several_rewards(tmp_path):
    command = TRAIN[1].split()
    assert main([*command, *FLAGS, "--warm-start-steps", "0", "--run-dir", "brief"]) == 0
    for line in metrics(tmp_path / "brief")[1:]:
        assert {"reward/task", "reward/brevity"} <= line.keys()
        assert line["reward/brevity"] <= 0
        score = line["reward/task"] + 0.1 * line["reward/brevity"]
        # Scores are float32, and at most 1.
        assert line["critic/score/mean"] == pytest.approx(score, abs=1e-6)
