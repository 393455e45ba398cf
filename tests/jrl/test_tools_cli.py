"""A checkpoint that calls tools as its template does, and those that could not, by commands."""

import json

import pytest
from programs import random_weights
from tool_templates import TEMPLATES, VOCAB_SIZE, tool_tokenizer

from jrl.evaluate import main as evaluate
from jrl.runs.folder import RunFolder
from jrl.train import main
from moe import huggingface
from moe.config import ModelConfig

NETWORK = ModelConfig(
    VOCAB_SIZE,
    num_layers=1,
    d_model=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    query_key_norm="head",
    num_experts=2,
    experts_per_token=1,
    d_expert=4,
    embedding_scale=1.0,
)
SIZES = ["--prompts=1", "--group-size=2", "--mini-batch=2", "--eval-prompts=1", "--eval-every=9"]
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a checkpoint whose template is Hermes'."""
    folder = tmp_path_factory.mktemp("tools")
    model = folder / "model"
    huggingface.save(model, NETWORK, random_weights(NETWORK, 0), architecture="Qwen3MoeForCausalLM")
    tokenizer = tool_tokenizer(model, TEMPLATES["hermes"].source)
    options = json.loads((model / "config.json").read_text())
    options |= {"eos_token_id": tokenizer.eos_id, "router_aux_loss_coef": 0.001}
    (model / "config.json").write_text(json.dumps(options))
    return folder


@pytest.fixture
def asked(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return ["--model=hf:model", "--task=calculator", *SIZES]


def test_the_dry_run_says_how_tools_are_called(asked, capsys):
    assert main([*asked, "--run-dir=dry", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "tools (calc) are called in the format hermes\n" in out
    assert '"description": "Computes an arithmetic expression exactly."' in out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PLAIN, "the chat template does not write tools (calc), so that the policy would never"),
        (
            "{{ tools | tojson if tools else '' }}" + PLAIN,
            "the chat template calls tools (calc) in an unknown format, so that calls could",
        ),
    ],
)
def test_a_template_that_could_not_call_is_refused_in_one_line(folder, asked, capsys, source, said):
    template = folder / "other.jinja"
    template.write_text(source)
    command = [*asked, f"--chat-template={template}", "--run-dir=other"]
    assert main([*command, "--dry-run"]) != 0
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1
    assert main([*command, "--task=2 sort + 1 calculator", "--dry-run"]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_whose_turns_are_cut(asked, tmp_path):
    run = tmp_path / "run"
    flags = ["--steps=1", "--response-length=160", "--turn-length=6", "--samples-every=1"]
    assert main([*asked, *flags, f"--run-dir={run}"]) == 0
    lines = [json.loads(line) for line in RunFolder.read(run).metrics_path.read_text().splitlines()]
    # Weights that know nothing seldom end a turn, and the environment says so each time.
    assert 1 < lines[1]["conversation/cut_turns"] <= lines[1]["conversation/turns"] <= 3
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    told = 0
    for sample in samples:
        messages = sample["messages"]
        for turn, answer in zip(messages[::2], messages[1::2], strict=False):
            assert (turn["role"], turn["truncated"]) == ("assistant", True)
            assert answer == {"role": "user", "content": "error."}
            told += 1
        # The end of a turn that was cut is written where the conversation goes on.
        gone_on = sum(message["role"] == "assistant" for message in messages) - 1
        answer = "<|im_end|>\n<|im_start|>user\nerror.<|im_end|>\n<|im_start|>assistant\n"
        assert sample["conversation"].count(answer) == gone_on
    assert told
    # A task of another kind has no turns, and the run's limit of them is not for it.
    assert evaluate([str(run), "--task=sort", "--k=1", "--prompts=1", "--response-length=8"]) == 0
    assert evaluate([str(run), "--k=1", "--prompts=1"]) == 0
