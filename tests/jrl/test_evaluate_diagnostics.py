"""``python -m jrl.evaluate RUN --diagnostics``: what the critic of a run is worth."""

import json

import pytest
from command_runs import FLAGS, one_line

from jrl import evaluate, train


@pytest.fixture(scope="module", params=["vapo"])
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("judged") / "run"
    assert train.main([request.param, *FLAGS, "--run-dir", str(path)]) == 0
    return path


def test_evaluate_measures_the_critic_of_a_run(run, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--diagnostics", "--k", "4", "--prompts", "8", "--json", str(out)]
    assert evaluate.main([str(run), *flags]) == 0
    found = json.loads(out.read_text())
    assert found["critic/td/identity_gap"] < 1e-4
    assert 0 <= found["critic/outcome_contradiction"] <= 1
    assert (run / "plots" / "value_diagnostics.png").stat().st_size > 50_000
    assert "terminal_reach/share" in capsys.readouterr().out


def test_a_run_without_a_critic_says_so(tmp_path, capsys):
    assert train.main([*FLAGS, "--run-dir", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "run"), "--diagnostics"]) == 2
    assert "is one of recipe grpo, which trains no critic" in one_line(capsys.readouterr())
