"""Training from a public checkpoint with its own tokenizer, on a file of prompts."""

import json
import shutil
from pathlib import Path

import chex
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from jrl.evaluate import main as evaluate
from jrl.runs.folder import RunFolder
from jrl.text.json_tokenizer import JsonTokenizer, checkpoint_tokenizer
from jrl.text.load import load_tokenizer
from jrl.text.tokenizer import Tokenizer
from jrl.train import main
from jrl.trainer import loop
from jrl.trainer.evaluation.saved_policy import read_model_config
from moe.huggingface import config_from, load

FIXTURE = Path(__file__).parents[1] / "moe" / "huggingface" / "qwen3_moe"
CHARACTERS = "0123456789+="
# The network has 37 ids and the tokenizer fewer, as in public checkpoints.
SPECIAL = ["<pad>", "<s>", "</s>"]


def pipeline():
    tokens = [*SPECIAL, *CHARACTERS, "12"]
    model = models.BPE({token: n for n, token in enumerate(tokens)}, merges=[("1", "2")])
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(SPECIAL)
    made.decoder = decoders.Fuse()
    return made


def make_checkpoint(path):
    shutil.copytree(FIXTURE, path)
    pipeline().save(str(path / "tokenizer.json"))
    named = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


def test_the_tokenizer_of_a_checkpoint(checkpoint, tmp_path):
    tokenizer = checkpoint_tokenizer(checkpoint, 37)
    ids = tokenizer.encode("112=")
    assert ids == [4, 15, 14]
    assert tokenizer.decode([1, *ids, 2, 36]) == "112="
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    tokenizer.save(tmp_path / "tokenizer.model")
    again = load_tokenizer(tmp_path / "tokenizer.model")
    assert isinstance(again, JsonTokenizer)
    assert (again.vocab_size, again.encode("112="), again.eos_id) == (37, ids, 2)
    with pytest.raises(ValueError, match="ids has 37, outside of the vocabulary of 37"):
        again.decode([37])


def test_an_end_that_only_the_options_name(checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = checkpoint_tokenizer(folder, 37)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, None, 2)


def test_sentencepiece_and_what_does_not_go_with_the_network(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="neither tokenizer"):
        checkpoint_tokenizer(tmp_path, 37)
    with pytest.raises(ValueError, match=r"ids up to 15 and the network 9 ids"):
        checkpoint_tokenizer(checkpoint, 9)
    characters = Tokenizer.train_characters(CHARACTERS)
    characters.save(tmp_path / "tokenizer.model")
    assert checkpoint_tokenizer(tmp_path, 16).encode("12") == characters.encode("12")
    with pytest.raises(ValueError, match=r"has 16 ids and the network 37"):
        checkpoint_tokenizer(tmp_path, 37)


@pytest.fixture
def data(tmp_path):
    lines = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(3)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_training_is_given_the_weights_of_the_checkpoint(checkpoint, data, tmp_path, monkeypatch):
    given = []

    def stopped(setup, folder, weights, *rest):
        given.extend((setup, weights))
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", stopped)
    flags = ["--prompts=2", "--group-size=2", "--mini-batch=4", "--eval-prompts=2"]
    names = [f"--model=hf:{checkpoint}", f"--task=jsonl:{data}", f"--run-dir={tmp_path / 'run'}"]
    assert main([*names, *flags, "--response-length=4"]) == 130
    setup, weights = given
    unused = setup.tokenizer.unused_ids
    assert setup.model == config_from(FIXTURE).with_unused_ids(unused)
    assert setup.tokenizer.encode("112=") == [4, 15, 14]
    _, expected = load(FIXTURE, setup.mesh)
    chex.assert_trees_all_equal(weights, expected)


@pytest.mark.slow
def test_training_begins_from_a_checkpoint_and_goes_on_without_it(
    checkpoint, data, tmp_path, capsys
):
    moved = tmp_path / "model"
    shutil.copytree(checkpoint, moved)
    flags = ["--prompts=2", "--group-size=2", "--mini-batch=4", "--eval-prompts=2"]
    flags.append("--response-length=4")
    given = [f"--model=hf:{moved}", f"--task=jsonl:{data}", f"--run-dir={tmp_path / 'run'}"]
    assert main([*given, *flags, "--steps=1", "--eval-every=1", "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()
    assert main([*given, *flags, "--steps=1", "--eval-every=1"]) == 0
    assert f"starting from the checkpoint in {moved}" in capsys.readouterr().out
    folder = RunFolder.read(tmp_path / "run")
    assert read_model_config(folder) == config_from(FIXTURE)
    first = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert [line["step"] for line in first] == [0, 1]
    assert not any(name.startswith("warm_start") for name in first[0])
    # An untrained network is as uncertain as its vocabulary allows at most.
    assert 0 < first[1]["actor/entropy"] <= np.log(37)
    shutil.rmtree(moved)
    assert main(["--resume", f"--run-dir={tmp_path / 'run'}", "--steps=2"]) == 0
    assert evaluate([str(tmp_path / "run"), "--k=1", "--prompts=2"]) == 0


@pytest.mark.slow
def test_a_bare_checkpoint_is_evaluated_on_any_task(checkpoint, tmp_path, capsys):
    """As the run that begins with it is, before it has learned anything."""
    rows = [{"prompt": f"{n}+{n}=", "answer": 2 * n} for n in range(12)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = [f"--task=jsonl:{path}", "--held-out=4", "--response-length=3"]
    flags = ["--k=2", "--prompts=3", f"--json={tmp_path / 'numbers.json'}"]
    assert evaluate([f"hf:{checkpoint}", *task, *flags]) == 0
    bare = json.loads((tmp_path / "numbers.json").read_text())
    assert (bare["recipe"], bare["step"], bare["prompts"]) == ("checkpoint", 0, 3)
    assert bare["response_length/mean"] <= 3
    run = str(tmp_path / "run")
    assert main([f"--model=hf:{checkpoint}", *task, "--steps=0", f"--run-dir={run}"]) == 0
    assert evaluate([run, *flags]) == 0
    begun = json.loads((tmp_path / "numbers.json").read_text())
    names = [name for name in bare if name not in ("run", "recipe")]
    assert {name: begun[name] for name in names} == {name: bare[name] for name in names}


def test_a_bare_checkpoint_has_no_task_of_its_own(checkpoint, capsys):
    assert evaluate([f"hf:{checkpoint}"]) == 2
    assert "is a checkpoint, which has no task: give --task" in capsys.readouterr().err
