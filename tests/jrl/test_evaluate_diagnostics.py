"""``python -m jrl.evaluate RUN --diagnostics``: what the critic of a run is worth."""

import json
import shutil

import pytest
from command_runs import FLAGS, one_line

from jrl import evaluate, train
from jrl.report import critic
from jrl.runs.checkpoints import Checkpoints
from jrl.trainer.evaluation import evaluate as critic_evaluation


@pytest.fixture(scope="module", params=["vapo"])
def run(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("rollouts") / "run"
    assert train.main([request.param, *FLAGS, "--run-dir", str(path)]) == 0
    return path


@pytest.fixture
def rollouts(monkeypatch):
    """What each report was made of."""
    seen, diagnostics = [], critic.critic_diagnostics
    monkeypatch.setattr(
        critic, "critic_diagnostics", lambda rollout: seen.append(rollout) or diagnostics(rollout)
    )
    return seen


@pytest.fixture(autouse=True)
def _batches(monkeypatch):
    """Eight prompts of four completions in batches of three prompts."""
    monkeypatch.setattr(critic_evaluation, "MAX_ROWS_PER_CALL", 12)


@pytest.mark.slow
def test_evaluate_measures_the_critic_of_a_run(run, rollouts, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--diagnostics", "--k", "4", "--prompts", "8", "--json", str(out)]
    assert evaluate.main([str(run), *flags]) == 0
    found = json.loads(out.read_text())
    assert found["critic/td/identity_gap"] < 1e-4
    assert 0 <= found["critic/outcome_contradiction"] <= 1
    assert (run / "plots" / "value_diagnostics.png").stat().st_size > 50_000
    out = capsys.readouterr().out
    assert "terminal_reach/share" in out and "critic: 32/32 completions" in out
    # No prompt is left out or counts twice.
    (rollout,) = rollouts
    assert rollout.groups.tolist() == [number for number in range(8) for _ in range(4)]
    assert {len(rollout.values), len(rollout.mask), len(rollout.correct)} == {32}


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [False, True])
def test_policy_and_critic_are_of_one_checkpoint(run, replaced, tmp_path, monkeypatch):
    """A checkpoint that comes, or takes the place of another, between the two is seen whole."""
    copy = shutil.copytree(run, tmp_path / "copy")
    old, new = copy / "checkpoints" / "2", copy / "checkpoints" / ("2" if replaced else "3")
    restore, read = Checkpoints.restore, []

    def and_then(self, step, like, part=""):
        found = restore(self, step, like, part)
        if not read:
            shutil.copytree(old, copy / "next")
            if replaced:
                shutil.rmtree(old)
            (copy / "next").rename(new)
        read.append((step, part))
        return found

    monkeypatch.setattr(Checkpoints, "restore", and_then)
    assert evaluate.main([str(copy), "--diagnostics", "--k", "4", "--prompts", "8"]) == 0
    assert read == [(2, "policy/weights"), (2, "critic/weights")] * (2 if replaced else 1)


def test_a_run_without_a_critic_says_so(grpo_run, capsys):
    assert evaluate.main([str(grpo_run), "--diagnostics"]) == 2
    assert "has recipe grpo, which trains no critic" in one_line(capsys.readouterr())
