"""The page "Your own recipe": its file trains, goes on and is evaluated as the page says."""

import json
import re

import pytest
from command_runs import FLAGS, metrics, one_line
from places import ROOT

from jrl import evaluate, train
from jrl.config.flags import parse_arguments
from jrl.train import main

PAGE = (ROOT / "docs" / "recipes.md").read_text()
SOURCE = re.findall(r'(?ms)^```python title="soft.py"\n(.*?)^```', PAGE)[0]
COMMAND = re.findall(r"(?m)^jrl train (.*)$", PAGE)[0].split()
# The last step is evaluated always: so is every one, that a run in parts is the whole.
EACH = ["--eval-every", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "soft.py").write_text(SOURCE)


def test_adding_one_takes_few_lines():
    assert len(SOURCE.splitlines()) < 40


def test_its_flags_are_listed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["soft.py:Sapo", "--help"])
    assert "Temperature of the gate" in " ".join(capsys.readouterr().out.split())
    assert main(["--recipe", "soft.py:Soft"]) == 2
    assert "soft.py has no class Soft" in one_line(capsys.readouterr())
    assert main(["--recipe"]) == 2
    assert "--recipe needs a name, or path/to/file.py:Name" in one_line(capsys.readouterr())


@pytest.mark.slow
def test_it_trains_goes_on_and_is_evaluated(tmp_path, capsys):
    assert main([*COMMAND, *FLAGS, *EACH, "--run-dir", "whole"]) == 0
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["recipe"], config["hyperparameters"]["tau_negative"]) == ("recipe.py:Sapo", 1.2)
    assert (tmp_path / "whole" / "recipe.py").read_text() == SOURCE
    lines = metrics(tmp_path / "whole")
    assert all("actor/gate" in line for line in lines[1:])
    # A run that has begun keeps to its copy.
    assert main([*COMMAND, *FLAGS, *EACH, "--steps", "1", "--run-dir", "parts"]) == 0
    (tmp_path / "soft.py").write_text(SOURCE.replace("aggregation=None", "aggregation=1 / 0"))
    assert main(["--resume", "--run-dir", "parts", "--steps", "2"]) == 0
    assert metrics(tmp_path / "parts") == lines
    assert main([*COMMAND[:2], "--resume", "--run-dir", "parts", "--steps", "3"]) == 2
    assert "the recipe is sapo in the run, soft.py:Sapo was given" in capsys.readouterr().err
    assert evaluate.main(["parts", "--k", "1", "--prompts", "4", "--json", "numbers.json"]) == 0
    assert json.loads((tmp_path / "numbers.json").read_text())["recipe"] == "sapo"


def test_processes_must_have_the_same_file(tmp_path):
    (tmp_path / "other.py").write_text(SOURCE.replace("1.05", "1.25"))
    said = [
        train._shared_settings(parse_arguments([f"{name}.py:Sapo", "--tau-negative=2"]))
        for name in ("soft", "other")
    ]
    assert {name for name in said[0] if said[0][name] != said[1][name]} == {"the recipe's file"}
