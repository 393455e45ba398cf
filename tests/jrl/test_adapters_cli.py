"""A run of adapters by command line: PEFT's files out and in, and what is refused."""

import json

import numpy as np
import pytest
from command_runs import FLAGS
from safetensors.numpy import load_file
from test_checkpoint_cli import make_checkpoint

from jrl.evaluate import main as evaluate
from jrl.export import main as export
from jrl.train import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("adapters") / "model")


def flags_of(checkpoint, path, *more):
    task = path.parent / "prompts.jsonl"
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [flag for flag in FLAGS if not flag.startswith("--model")]
    given = [f"--model=hf:{checkpoint}", f"--task=jsonl:{task}", "--response-length=4"]
    return [*settings, *given, "--verifiers=1", f"--run-dir={path}", *more]


def test_adapters_of_a_run_are_where_the_next_begins(checkpoint, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    lora = ["--lora-rank=2", "--lora-targets=attention,experts", "--steps=1"]
    # A policy that is never right has nothing else to learn from.
    lora += ["--entropy-coef=1", "--learning-rate=0.5"]
    assert main(flags_of(checkpoint, first, *lora)) == 0
    written = json.loads((first / "adapters" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["bias"]) == (2, 4.0, "none")
    assert written["base_model_name_or_path"] == str(checkpoint)  # as the user named it
    assert "give --base-name OWNER/NAME" in capsys.readouterr().out
    kept = {path.name for path in (first / "adapters").iterdir()}
    assert kept >= {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    card = (first / "adapters" / "README.md").read_text()
    assert "| steps | 1 of 1 |" in card and " prompts) |" in card
    tensors = load_file(first / "adapters" / "adapter_model.safetensors")
    assert any(np.any(x) for name, x in tensors.items() if "lora_B" in name)
    # What another rank would make of it is no run of these checkpoints.
    capsys.readouterr()
    resume = ["--resume", f"--run-dir={first}"]
    assert main([*resume, "--lora-rank=3", "--steps=2"]) == 2
    assert "--lora-rank is 2 in the run, 3 was given" in capsys.readouterr().err
    start = f"--lora-from={first / 'adapters'}"
    assert main(flags_of(checkpoint, second, start, "--lora-rank=3", "--steps=0")) == 2
    assert "lora_rank=3 differs from the 2 of lora_from" in capsys.readouterr().err
    assert main(flags_of(checkpoint, second, start, "--steps=0")) == 0
    again = load_file(second / "adapters" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())
    assert evaluate([str(second), "--prompts=4", f"--json={tmp_path / 'found.json'}"]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["step"] == 0
    # On their base they answer as the merged export does.
    exported, found = tmp_path / "exported", []
    assert export([str(first), "--merge", f"--to={exported}", "--base-name=me/model"]) == 0
    assert 'base_model: "me/model"' in (exported / "README.md").read_text()
    flags = [f"--task=jsonl:{first.parent / 'prompts.jsonl'}", "--k=1", "--temperature=0"]
    flags += ["--response-length=8", "--show=0", "--verifiers=1", "--prompts=8", "--devices=1"]
    lora = f"--lora={first / 'adapters'}"
    for policy in ([str(exported)], [f"hf:{checkpoint}", lora], [f"hf:{checkpoint}"]):
        samples = tmp_path / f"{len(found)}.jsonl"
        assert evaluate([*policy, *flags, f"--samples={samples}"]) == 0
        found.append([json.loads(x)["completion"] for x in samples.read_text().splitlines()])
    assert found[0] == found[1] != found[2]
    assert f"with the adapters of {first / 'adapters'}" in capsys.readouterr().out
    assert evaluate([str(first), lora]) == 2
    assert "needs a published checkpoint to add adapters to" in capsys.readouterr().err
    # All of the file, training prompts with them, which is said.
    task = f"--task=jsonl:{second.parent / 'prompts.jsonl'}"
    few = ["--k=1", "--response-length=4", "--show=0"]
    capsys.readouterr()
    assert evaluate([str(second), task, *few]) == 0
    out = capsys.readouterr().out
    assert "note: the run was trained on jsonl:" in out and "\nall 12 prompts, " in out
    assert "prompts.jsonl; --held-out 0.1 selects the prompts that it was not trained on" in out
    assert evaluate([str(second), task, *few, "--held-out=0.1"]) == 0
    out = capsys.readouterr().out
    assert "was trained on" not in out and "12 prompts" not in out
    assert evaluate([str(second), "--dtype=bfloat16"]) == 2
    assert (
        "dtype='bfloat16' differs from that of the base weights that run" in capsys.readouterr().err
    )


def test_adapters_beside_nothing_that_is_there_are_refused(checkpoint, tmp_path, capsys):
    assert main([*FLAGS, f"--run-dir={tmp_path / 'a'}", "--lora-targets=attention"]) == 2
    assert "lora_targets='attention' changes nothing without adapters" in capsys.readouterr().err
    flags = [*FLAGS, f"--run-dir={tmp_path / 'b'}", "--lora-rank=2", "--lora-targets=shared"]
    assert main(flags) == 2
    assert "choose among attention,experts,head" in capsys.readouterr().err
    assert main([*FLAGS, f"--run-dir={tmp_path / 'c'}", f"--lora-from={checkpoint}"]) == 2
    assert "give --model hf:DIR" in capsys.readouterr().err
