"""``python -m jrl.evaluate RUN --diagnostics``: what the critic of a run is worth."""

import json

import pytest
from command_runs import FLAGS, one_line

from jrl import evaluate, train


@pytest.mark.slow
def test_evaluate_measures_the_critic_of_a_run(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out.json"
    assert train.main(["vapo", *FLAGS, "--run-dir", str(run)]) == 0
    capsys.readouterr()
    flags = ["--diagnostics", "--k", "4", "--prompts", "8", "--json", str(out)]
    assert evaluate.main([str(run), *flags]) == 0
    found = json.loads(out.read_text())
    assert found["critic/td/identity_gap"] < 1e-4
    assert 0 <= found["critic/outcome_contradiction"] <= 1
    assert (run / "plots" / "value_diagnostics.png").stat().st_size > 50_000
    assert "terminal_reach/share" in capsys.readouterr().out


def test_a_run_without_a_critic_says_so(grpo_run, capsys):
    assert evaluate.main([str(grpo_run), "--diagnostics"]) == 2
    assert "is one of recipe grpo, which trains no critic" in one_line(capsys.readouterr())
