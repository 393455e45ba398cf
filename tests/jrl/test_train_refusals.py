"""What `python -m jrl.train` refuses: in one line, with nothing left behind."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from command_runs import FLAGS, one_line

from jrl.train import main
from jrl.trainer import loop

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def test_an_existing_run_is_not_written_over(grpo_run, capsys):
    assert main([*FLAGS, "--run-dir", str(grpo_run)]) == 2
    assert "already holds a run: continue it with --resume" in one_line(capsys.readouterr())


def test_errors_are_json_objects_on_demand(grpo_run, capsys):
    assert main([*FLAGS, "--log-json", "--run-dir", str(grpo_run)]) == 2
    captured = capsys.readouterr()
    record = json.loads(captured.err)
    assert (record["level"], record["process"]) == ("error", 0)
    assert "already holds a run: continue it with --resume" in record["message"]
    assert main([*FLAGS, "--run-dir", str(grpo_run)]) == 2
    assert one_line(capsys.readouterr()).startswith("error: ")


def test_a_line_that_does_not_parse_is_named_with_its_file(tmp_path, capsys):
    Path("data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", answer}\n')
    assert main(["--task", "jsonl:data.jsonl"]) == 2
    assert "data.jsonl:2: is not JSON" in one_line(capsys.readouterr())
    assert os.listdir() == ["data.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task sorrt", r"task='sorrt' is unknown: did you mean sort\? The tasks are sort, add"),
        ("drpo", r"recipe 'drpo' is unknown: did you mean grpo or .* The recipes are ppo, grpo"),
        ("--model tinny", "model='tinny' is not a preset; near: tiny"),
        ("--run-dir=", "run_dir='' is empty: give a folder"),
        ("--prompts 3", r"mini_batch=8 does not divide prompts x group_size = 3 x 4 = 12 compl"),
        ("--micro-batch 3", "micro_batch=3 does not divide mini_batch=8"),
        ("--steps -1", "steps=-1 must be at least 0"),
        ("--hang-deadline -1", r"hang_deadline=-1\.0 must be at least 0"),
        ("--layout dp32", "layout 'dp32' needs 32 devices and there are 16: .* --devices 32"),
        ("--layout dq2", "layout 'dq2': 'dq2' is not an axis and a size"),
        ("--layout dp2 --slots 5", "slots=5 does not divide over dp x tp = 2 of layout 'dp2'"),
        ("--layout tp4", "'kv_head' of size 2 cannot be split over 4 devices"),
        (
            "--layout cp2 --slots 3",
            "slots=3 .* dp x tp = 2 of rollout layout 'tp1 cp1 dp2",
        ),
        ("--layout cp2 --rollout-layout cp2", "'cp2': .* pp and cp must be 1, for .* 'tp1 cp1 dp2"),
        ("--layout cp2 --rollout-layout tp4", "'tp4' needs 4 devices and the .* training has 2"),
        (
            "--layout tp2 --prompt-length 13 --response-length 20 --micro-batch 4",
            "the prompts of a micro_batch have 13 tokens .* divide over cp x tp = 2",
        ),
        ("--devices 32", "devices=32 comes too late: this process has started JAX with 16"),
        ("--seed -1", "seed=-1 must lie in 0..4294967295"),
        ("--devices 0", "devices=0 must be at least 1"),
        ("--prompt-length 3", "prompt_length=3 is too short: the task needs 10 tokens"),
        ("--tokenizer no.model", "no.model: cannot be read .*: give the path of a SentencePiece"),
        ("--weights no-run", "run folder no-run holds no run"),
        ("--resume", "--resume needs --run-dir"),
        ("--resume --run-dir no-run", "run folder no-run holds no run"),
        ("--clip-low -1", r"clip_low=-1\.0 must be at least 0"),
        ("--clip-dual 0.5", r"clip_dual=0\.5 must be above 1"),
        ("cispo --clip-dual 3", r"clip_dual=3\.0 has no effect on cispo: leave it out"),
        ("--learning-rate -1", r"learning_rate=-1\.0 must be at least 0"),
        ("--max-grad-norm 0", r"max_grad_norm=0\.0 must be above 0"),
        ("--warm-start-steps -3", "warm_start_steps=-3 must be at least 0"),
        ("--warm-start-learning-rate nan", "warm_start_learning_rate=nan must be a finite number"),
        ("ppo --gamma 2", r"gamma=2\.0 must lie in 0\.\.1"),
        ("vapo --lam-critic nan", r"lam_critic=nan must be a finite number"),
        ("--clip-high inf", "clip_high=inf must be a finite number"),
        (
            "--log-to wandb",
            r'logging to wandb needs the package wandb: pip install -e "\.\[wandb\]"',
        ),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(arguments, message, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    words = arguments.split()
    recipe = [words.pop(0)] if not words[0].startswith("-") else []
    assert main([*recipe, *FLAGS, *words]) == 2
    assert re.search(message, one_line(capsys.readouterr()))
    assert os.listdir() == []


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(grpo_run, capsys):
    assert main([*FLAGS, "--weights", str(grpo_run), "--model", "micro-wide"]) == 2
    line = one_line(capsys.readouterr())
    assert "is of another model: policy/weights/layers/experts/" in line
    assert "layers/experts/gate_up is float32[1,4,8,2,6], not float32[1,4,8,2,10]" in line
    assert os.listdir() == []


def test_weights_bring_their_tokenizer(grpo_run, capsys):
    given = ["--weights", str(grpo_run), "--tokenizer", str(grpo_run / "tokenizer.model")]
    assert main([*FLAGS, *given]) == 2
    assert "leave out --tokenizer" in one_line(capsys.readouterr())


def test_a_tokenizer_that_lacks_characters_is_refused(grpo_run, capsys):
    given = ["--task", "countdown", "--weights", str(grpo_run)]
    assert main([*FLAGS, *given]) == 2
    assert re.search(
        r"text has the character .* not among the .* pieces", one_line(capsys.readouterr())
    )
    assert os.listdir() == []


def test_an_unknown_flag_is_explained(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--stps", "3"])
    assert "--steps" in capsys.readouterr().err


def test_a_run_that_fails_is_one_line(monkeypatch, capsys):
    def fail(*_, **__):
        raise loop.NonFiniteRun("step 7: 5 updates of the policy in a row ...")

    monkeypatch.setattr(loop, "train", fail)
    assert main(FLAGS) == 1
    assert one_line(capsys.readouterr()) == "error: step 7: 5 updates of the policy in a row ..."


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(loop, "train", lambda *_, **__: int("no number"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(FLAGS)
