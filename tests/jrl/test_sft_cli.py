"""Supervised fine-tuning by command line: a run, its resumption, and what comes after it."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from chat_checkpoint import END, TURN, VOCAB_SIZE, write_tokenizer
from chat_records import ANSWERS, RECORDS
from chat_records import TEMPLATE as RECORDS_TEMPLATE
from command_runs import metrics, one_line
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh
from test_export_cli import QUESTION, checkpoint_in
from tiers import full_but

from jrl import export
from jrl.config.flags import idle_fields
from jrl.evaluate import main as evaluate
from jrl.recipes import Sft
from jrl.runs.records import read, read_metrics
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.train import main
from jrl.trainer.supervised import Supervised
from moe import huggingface, model
from moe.config import Model
from moe.placement import specs

SMALL = ["--model=micro", "--batch=3", "--learning-rate=1e-2", "--eval-every=2", "--held-out=4"]
PAGE = (Path(__file__).parents[2] / "docs" / "sft.md").read_text(encoding="utf-8")
ANSWER = "4.5 litres"
REWARD = 'def reward(prompt, completion, **record):\n    return float("litres" in completion)\n'


def chats_in(path, number=12):
    lines = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(number)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"--task=jsonl:{path}"


def test_help_has_what_means_something(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["sft", "--help"])
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    flags = set(re.findall(r"--(?:no-)?([a-z][a-z-]+)", text))
    assert {"batch", "max-length", "lora-rank", "dtype", "epochs", "packing", "learn"} <= flags
    named = {name.replace("_", "-") for name in idle_fields(Sft)}
    # Their own flags, not texts that name them.
    listed = set(re.findall(r"--([a-z-]+) (?:INT|STR|FLOAT|\{|\[)", text))
    assert not named & listed and len(listed) > 30
    assert "0 takes as many as --epochs" in text and "Supervised fine-tuning" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task=sort"], "task='sort' has no conversations"),
        (["--batch=6", "--micro-batch=4"], "micro_batch=4 does not divide batch=6"),
        (["--max-length=1"], "max_length=1 leaves no token to predict"),
        (["--max-length=4"], "of 12 conversations .* are too long, .* raise --max-length"),
        (["--config=idle.yaml"], "temperature=0.5 changes nothing in sft: leave it out"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idle.yaml").write_text("recipe: sft\ntemperature: 0.5\n")
    assert main(["sft", chats_in(tmp_path / "chats.jsonl"), "--model=micro", *flags]) == 2
    assert re.search(message, one_line(capsys.readouterr()))
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_what_is_learned(tmp_path, capsys):
    given = ["sft", chats_in(tmp_path / "chats.jsonl"), *SMALL, "--epochs=3", "--max-length=7"]
    assert main([*given, f"--run-dir={tmp_path / 'run'}", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "conversations" in out and "held out" in out and "3 epochs" in " ".join(out.split())
    assert re.search(r"dropped, truncated +3, 0", out)
    # A question of one digit and its answer; then the answer and its end alone.
    read_by, learned = out.split("The first conversation as the network reads it\n")[1].split(
        "Its tokens in the loss\n"
    )
    assert re.fullmatch(r"<s>\d\+1=\d</s>", read_by.strip())
    assert learned.strip() == read_by.strip()[-5:]


@pytest.mark.parametrize("name", full_but(RECORDS, "a call as JSON"))
def test_both_stages_show_the_same_conversation(name, tmp_path, monkeypatch, capsys):
    """And what they leave out, and what ends a turn."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "tokens", eos_token=END, chat_template=RECORDS_TEMPLATE)
    (tmp_path / "tokens" / "generation_config.json").unlink()
    record, prompt, said = RECORDS[name]
    field = ANSWERS.get(name, "answer")
    asked = {"messages": [{"role": "user", "content": "1+1?"}]}
    asked |= {"answer": "2", "reward_model": {"answer": "2"}}
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in (record, asked, record))
    )
    (tmp_path / "b.jsonl").write_text(json.dumps(asked) + "\n")
    given = ["--task=jsonl:a.jsonl", "--held-out=b.jsonl", "--model=micro", "--dry-run"]
    given += ["--tokenizer=tokens/tokenizer.json", f"--answer-field={field}"]
    shown = {}
    for recipe in ("sft", "grpo"):
        verifiers = ["--verifiers=1"] if recipe == "grpo" else []
        assert main([recipe, *given, *verifiers, f"--run-dir={recipe}"]) == 0
        shown[recipe] = capsys.readouterr().out
        ends = f"turns end with {TURN}, as the chat template writes them; {END} end them too"
        assert ends in shown[recipe]
    read_by = shown["grpo"].split("The first prompt as the network reads it\n")[1]
    assert read_by.startswith(f"{prompt}\nturns end with")
    conversation, learned = (
        shown["sft"]
        .split("The first conversation as the network reads it\n")[1]
        .split("Its tokens in the loss\n")
    )
    assert conversation == f"{prompt}{said}\n"
    if name == "texts":  # as the page has it
        (block,) = re.findall(r"(?s)```\n(The first conversation as .*?)```", PAGE)
        assert block in shown["sft"]
    # Of several turns those before are learned too.
    assert learned.split("\nturns end")[0].endswith(said)
    assert "dropped 1 records with a duplicate prompt" in shown["grpo"]
    assert "dropped 1 training prompts that are held out" in shown["grpo"]


def test_supervised_run_learns_held_out_answers(tmp_path):
    folder = tmp_path / "run"
    given = ["sft", chats_in(tmp_path / "chats.jsonl"), *SMALL, "--steps=3", "--samples-every=2"]
    assert main([*given, f"--run-dir={folder}"]) == 0
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[-1]["val/nll"] < lines[0]["val/nll"]


@pytest.mark.slow
def test_a_run_goes_on_in_mid_epoch_to_the_same_end(tmp_path, pictures, monkeypatch, capsys):
    given = ["sft", chats_in(tmp_path / "chats.jsonl"), *SMALL, "--epochs=2", "--samples-every=2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*given, f"--run-dir={whole}"]) == 0
    said = capsys.readouterr().out
    assert "held-out conversations, start -> step 6: loss" in said
    lines = read_metrics(whole / "metrics.jsonl")
    assert "8 conversations to train on and 4 held out" in said
    assert lines[-1]["step"] == 6
    assert lines[-1]["val/nll"] < lines[0]["val/nll"]
    assert lines[-1]["training/epoch"] >= 2
    # What a run.yaml repeats is that run.
    settings = yaml.safe_load((whole / "run.yaml").read_text())
    assert not set(settings) & idle_fields(Sft) and settings["steps"] == lines[-1]["step"]
    for name in ("report.html", "plots/nll.png"):
        assert (whole / name).is_file()
    assert {line["step"] for line in read(whole / "samples.jsonl")} == {0, 2, 4, lines[-1]["step"]}

    capsys.readouterr()
    asked = [str(whole), "--k=1", "--prompts=2", "--task=addition"]
    assert evaluate([*asked, f"--json={tmp_path / 'found.json'}"]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["task"] == "addition"

    step = Supervised.step

    def interrupted(stage, state):
        if int(state.step) == 3:
            raise KeyboardInterrupt
        return step(stage, state)

    again = ["sft", f"--config={whole / 'run.yaml'}", "--checkpoint-every=2", f"--run-dir={cut}"]
    with monkeypatch.context() as patch:
        patch.setattr(Supervised, "step", interrupted)
        assert main(again) == 130
    # A file with another line is refused, and nothing of the run is lost.
    path = tmp_path / "chats.jsonl"
    capsys.readouterr()
    content = path.read_bytes()
    path.write_bytes(content + b'{"prompt": "99+1=", "completion": "100"}\n')
    for flags in ([], ["--dry-run"]):
        assert main(["--resume", f"--run-dir={cut}", *flags]) == 2
        line = one_line(capsys.readouterr())
        assert "has 13 conversations (hash " in line and "and had 12 conversations (hash " in line
    path.write_bytes(content)
    assert main(["--resume", f"--run-dir={cut}"]) == 0
    assert metrics(cut) == metrics(whole)
    assert read(cut / "samples.jsonl") == read(whole / "samples.jsonl")


# As greedy_of_transformers.py prints them of both exports: the answer and the end of the turn.
COMPLETION = [19, 13, 20, 220, 75, 72, 83, 81, 259, 302]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A checkpoint as Qwen3's, conversations, questions and a reward."""
    folder = tmp_path_factory.mktemp("stages")
    checkpoint_in(folder / "model")
    others = [(f"Is {n} more than 5?", "yes" if n > 5 else "no") for n in range(3)]
    pairs = [(QUESTION, ANSWER)] * 5 + others
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in pairs
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [{"prompt": q} for q, _ in [(QUESTION, ""), *others]]
    (folder / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    (folder / "litres.py").write_text(REWARD)
    return folder


@pytest.mark.slow
def test_conversations_then_rewards_then_exports_that_others_read(given, tmp_path, capsys):
    """The whole network learns from conversations, adapters from a reward; greedy tokens of both
    exports are those that `transformers` generates from them."""
    first, second, network = tmp_path / "sft", tmp_path / "grpo", f"--model=hf:{given / 'model'}"
    chats = [f"--task=jsonl:{given / 'chats.jsonl'}", "--batch=8", "--steps=60", "--eval-every=99"]
    chats += ["--learning-rate=3e-2", "--samples-every=99", "--response-length=12"]
    assert main(["sft", network, *chats, f"--run-dir={first}"]) == 0
    asked = [f"--task=jsonl:{given / 'asked.jsonl'}", f"--reward={given / 'litres.py'}:reward"]
    asked += ["--prompts=2", "--group-size=2", "--mini-batch=4", "--eval-prompts=1", "--steps=2"]
    asked += ["--response-length=12", "--verifiers=1", "--learning-rate=1e-4", "--eval-every=2"]
    asked += ["--lora-rank=4", "--entropy-coef=0.01", f"--weights={first}", f"--run-dir={second}"]
    assert main(["grpo", network, *asked]) == 0
    tested = [str(second), "--k=1", "--prompts=1", f"--json={tmp_path / 'found.json'}"]
    assert evaluate(tested) == 0
    assert json.loads((tmp_path / "found.json").read_text())["step"] == 2
    for run, merge in ((first, []), (second, ["--merge"])):
        to = tmp_path / f"{run.name}-exported"
        assert export.main([str(run), "--to", str(to), *merge]) == 0
    full, adapted = (tmp_path / f"{run.name}-exported" for run in (first, second))
    changed = [np.abs(a - b).max() for a, b in zip(*map(tensors_of, (full, adapted)), strict=True)]
    assert max(changed) > 0  # by the adapters
    capsys.readouterr()
    for to in (full, adapted):
        tokenizer = checkpoint_tokenizer(to, VOCAB_SIZE)
        prompt = ChatTemplate(tokenizer).encode(Conversation.from_pairs([("user", QUESTION)]))
        logits = logits_of(to, prompt + COMPLETION)[len(prompt) - 1 : -1]
        assert logits.argmax(axis=-1).tolist() == COMPLETION
        # Far enough from all others that no rounding has a say in it.
        best = np.sort(logits, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > 0.5
        assert tokenizer.decode(COMPLETION) == ANSWER and COMPLETION[-1] in tokenizer.stop_ids


def tensors_of(checkpoint):
    return jax.tree.leaves(huggingface.load(checkpoint, mesh_of("dp1"), dtype="float32")[1])


def logits_of(checkpoint, ids):
    """``[token, vocab]`` of what follows each token."""
    mesh = mesh_of("dp1")
    config, weights = huggingface.load(checkpoint, mesh, dtype="float32")
    run = on_mesh(
        lambda w, t: model.next_token_logits(w, t, t >= 0, Model(config, mesh))[0][None],
        mesh,
        (specs(Model(config, mesh)), P(mesh.dp)),
        P(tuple(axis for axis in mesh.axes if axis not in mesh.dp), mesh.dp),
    )
    return np.asarray(run(weights, jnp.asarray([ids]))).reshape(len(ids), -1)
