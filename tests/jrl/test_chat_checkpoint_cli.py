"""A checkpoint as Qwen's are learns from a file of word problems, by the command of the README."""

import json
import shutil

import pytest
from chat_checkpoint import END, QUESTIONS, START, TURN, VOCAB_SIZE, write_tokenizer
from programs import random_weights

from jrl.evaluate import main as evaluate
from jrl.runs.folder import RunFolder
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.train import main
from moe import huggingface
from moe.config import ModelConfig

NETWORK = ModelConfig(
    VOCAB_SIZE,
    num_layers=1,
    d_model=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    query_key_norm="head",
    num_experts=4,
    experts_per_token=2,
    d_expert=6,
    embedding_scale=1.0,
    max_positions=128,
)
SIZES = [
    "--prompts=2",
    "--group-size=4",
    "--mini-batch=8",
    "--eval-prompts=1",
    "--samples-every=1",
    "--eval-every=10",
]
# The order of questions hangs on the name of their file: one without the folder is always the same.
ASKED = ["--model=hf:model", "--task=jsonl:problems.jsonl", "--system-prompt=Answer with a number."]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The flags that name a checkpoint and a file, both made here."""
    folder = tmp_path_factory.mktemp("given")
    model, data = folder / "model", folder / "problems.jsonl"
    huggingface.save(model, NETWORK, random_weights(NETWORK, 0), architecture="Qwen3MoeForCausalLM")
    write_tokenizer(model)
    tokenizer = checkpoint_tokenizer(model, VOCAB_SIZE)
    options = json.loads((model / "config.json").read_text())
    options |= {"eos_token_id": tokenizer.eos_id, "router_aux_loss_coef": 0.001}
    (model / "config.json").write_text(json.dumps(options))
    rows = [{"question": question, "gold": answer} for question, answer in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, [*ASKED, "--prompt-field=question", "--answer-field=gold", *SIZES]


def test_a_dry_run_shows_the_prompt_and_why_completions_are_as_long_as_they_are(
    given, monkeypatch, capsys
):
    folder, flags = given
    monkeypatch.chdir(folder)
    assert main([*flags, "--run-dir=dry", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"{START}system\nAnswer with a number.{TURN}\n{START}user\n" in out
    assert f"{TURN}\n{START}assistant\n" in out
    assert "the default of a checkpoint" in out


@pytest.mark.slow
def test_a_dry_run_counts_the_prompts_that_are_too_long(given, tmp_path, monkeypatch, capsys):
    folder, flags = given
    monkeypatch.chdir(folder)
    rows = [{"question": "1" * 90 + f"{n}+1?", "gold": "2"} for n in range(3)]
    asked = (folder / "problems.jsonl").read_text()
    data = tmp_path / "longer.jsonl"
    data.write_text(asked + "".join(json.dumps(row) + "\n" for row in rows))
    # Only the three questions of ninety digits exceed the limit.
    flags = [f"--task=jsonl:{data}" if x.startswith("--task") else x for x in flags]
    assert main([*flags, "--prompt-length=100", "--run-dir=dry", "--dry-run"]) == 0
    assert "dropped 3 prompts of more than 100 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_ten_steps_on_word_problems(given, tmp_path, monkeypatch, capsys):
    folder, flags = given
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    model, run = tmp_path / "model", tmp_path / "run"
    assert main([*flags, f"--run-dir={run}", "--steps=10"]) == 0
    out = capsys.readouterr().out
    assert "completions of at most" in out and "limited by the checkpoint's positions" in out
    lines = [json.loads(line) for line in RunFolder.read(run).metrics_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(11))
    learned = [line for line in lines if "sampling/sampling_logp_difference/max" in line]
    assert len(learned) == 10
    # What is scored is what was sampled, to the rounding of float32 over a hundred positions.
    assert max(line["sampling/sampling_logp_difference/max"] for line in learned) < 1e-4
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    answers = {question: str(answer) for question, answer in QUESTIONS}
    trained = [sample for sample in samples if sample["kind"] == "training"]
    # Three questions are left to train on, so that the last of a pass may be the next one's first.
    prompts = [{s["prompt"] for s in trained if s["step"] == step} for step in range(1, 11)]
    assert max(map(len, prompts)) == 2
    ends = set()
    for sample in samples:
        begun = (
            f"{START}system\nAnswer with a number.{TURN}\n"
            f"{START}user\n{sample['prompt']}{TURN}\n{START}assistant\n"
        )
        assert sample["conversation"].startswith(begun)
        assert sample["answer"] == answers[sample["prompt"]]
        written = sample["conversation"][len(begun) :]
        assert written.endswith((TURN, END)) != sample["truncated"]
        ends |= {end for end in (TURN, END) if written.endswith(end)}
    assert ends, "no sample has an end"
    shutil.rmtree(model)  # the run has all that it needs
    assert main(["--resume", f"--run-dir={run}", "--steps=11", "--dry-run"]) == 0
    assert f"{START}system\nAnswer with a number.{TURN}" in capsys.readouterr().out
    assert evaluate([str(run), "--k=1", "--prompts=1"]) == 0
