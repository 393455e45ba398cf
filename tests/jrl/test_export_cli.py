"""What a run exports is what it learned, as files that other programs read."""

import errno
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_checkpoint import END, TURN, VOCAB_SIZE, write_tokenizer
from command_runs import MICRO, one_line
from family_files import write_family
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh, random_weights
from safetensors.numpy import load_file

from jrl import command_line, export
from jrl import train as train_module
from jrl.published.gguf import convert
from jrl.published.gguf_file import GgufFile
from jrl.runs.checkpoints import Checkpoints
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate, with_turn_end
from jrl.text.checkpoint_files import checkpoint_files, copy_checkpoint_files
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.load import load_tokenizer
from jrl.train import main as train
from jrl.trainer import loop
from moe import huggingface, model
from moe.config import Model, ModelConfig
from moe.placement import specs

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
SIZES = ["--prompts=2", "--group-size=4", "--mini-batch=8", "--eval-prompts=1"]
SAMPLING = {"temperature": 0.6, "top_k": 20, "do_sample": True}
QUESTION = "Half of 9 litres are used. How many are left?"


def numbers(text):
    return [int(word) for word in text.split()]


# As greedy_of_transformers.py prints them of the export in float32.
PROMPT = [
    301,
    84,
    285,
    81,
    198,
    39,
    64,
    75,
    69,
    220,
    78,
    69,
    220,
    24,
    220,
    75,
    72,
    83,
    81,
    259,
    295,
    220,
    84,
    285,
    67,
    13,
    296,
    258,
    268,
    88,
    295,
    220,
    75,
    68,
    69,
    83,
    30,
    302,
    198,
    301,
    281,
    82,
    72,
    274,
    268,
    83,
    198,
]
COMPLETION = [
    198,
    142,
    148,
    52,
    190,
    153,
    218,
    234,
    244,
    153,
    72,
    234,
    198,
    142,
    148,
    171,
    293,
    90,
    205,
    244,
    153,
    218,
    148,
    52,
]


def checkpoint_in(folder):
    """Of random weights, with options, ends and settings of sampling in several files."""
    weights = jax.device_put(random_weights(NETWORK, 0))
    huggingface.save(folder, NETWORK, weights, architecture="Qwen3MoeForCausalLM")
    write_tokenizer(folder)
    for name, more in (
        ("config.json", {"eos_token_id": 3, "router_aux_loss_coef": 0.25}),
        ("generation_config.json", SAMPLING),
    ):
        said = json.loads((folder / name).read_text()) | more
        (folder / name).write_text(json.dumps(said))
    return weights


def begun(flags, run, monkeypatch):
    """A run that saves what it is given as the checkpoints of steps 3 and 7, and stops."""

    def save(setup, folder, weights, *rest, **_):
        checkpoints, weights = Checkpoints(folder.checkpoints_path), weights()
        for step, factor in ((3, 2.0), (7, 1.0)):
            learned = jax.tree.map(lambda leaf, by=factor: leaf * by, weights)
            state = {"policy": {"weights": learned}, "prompts_seen": np.zeros((), np.int32)}
            checkpoints.save(step, state)
        checkpoints.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", save)
    assert train([*flags, *SIZES, "--response-length=4", f"--run-dir={run}"]) == 130


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory):
    """A run that began from a checkpoint which is gone, and the weights that it has at step 7."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint, data = folder / "model", folder / "problems.jsonl"
    weights = checkpoint_in(checkpoint)
    data.write_text('{"prompt": "1+1?", "answer": 2}\n{"prompt": "1+2?", "answer": 3}\n')
    with pytest.MonkeyPatch.context() as patch:
        flags = [f"--model=hf:{checkpoint}", f"--task=jsonl:{data}", "--verifiers=1"]
        begun(flags, folder / "run", patch)
    shutil.rmtree(checkpoint)
    return folder / "run", weights


@pytest.fixture(scope="module")
def exported(chat_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "model"
    assert export.main([str(chat_run[0]), "--to", str(path)]) == 0
    return path


@pytest.mark.slow
def test_weights_come_back_bit_for_bit(exported, chat_run):
    config, weights = huggingface.load(exported, mesh_of("dp1"))
    assert config == huggingface.config_from(chat_run[0] / "model.json")
    chex.assert_trees_all_equal(weights, chat_run[1])
    options = json.loads((exported / "config.json").read_text())
    assert options["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (options["router_aux_loss_coef"], options["eos_token_id"]) == (0.25, 3)


def test_the_tokenizer_comes_back_with_template_and_every_end(exported, chat_run):
    found = checkpoint_tokenizer(exported, VOCAB_SIZE)
    own = load_tokenizer(chat_run[0] / "tokenizer.model")
    assert (found.usage, found.named_tokens) == (own.usage, own.named_tokens)
    assert found.encode(QUESTION) == own.encode(QUESTION)
    generation = json.loads((exported / "generation_config.json").read_text())
    assert {name: generation[name] for name in SAMPLING} == SAMPLING
    # The ids of generation_config.json and the one that config.json alone had.
    assert generation["eos_token_id"] == [own.special_tokens[TURN], own.special_tokens[END], 3]


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(exported):
    """Each token of its completion is the likeliest after those before it."""
    tokenizer = checkpoint_tokenizer(exported, VOCAB_SIZE)
    assert ChatTemplate(tokenizer).encode(Conversation.from_pairs([("user", QUESTION)])) == PROMPT
    mesh = mesh_of("dp1")
    config, weights = huggingface.load(exported, mesh, dtype="float32")
    network = Model(config, mesh)
    tokens = jnp.asarray([PROMPT + COMPLETION])
    run = on_mesh(
        lambda w, t: model.next_token_logits(w, t, t >= 0, network)[0][None],
        mesh,
        (specs(network), P(mesh.dp)),
        P(tuple(axis for axis in mesh.axes if axis not in mesh.dp), mesh.dp),
    )
    logits = np.asarray(run(weights, tokens)).reshape(tokens.shape[1], -1)
    greedy = logits.argmax(axis=-1)[len(PROMPT) - 1 : -1]
    assert greedy.tolist() == COMPLETION
    assert len(set(COMPLETION)) > 4


@pytest.mark.slow
def test_an_export_is_trained_further_and_exported_as_it_came(exported, tmp_path, monkeypatch):
    """With the tokenizer's files of the run whose weights it has."""
    data = tmp_path / "problems.jsonl"
    data.write_text('{"prompt": "1+1?", "answer": 2}\n{"prompt": "1+2?", "answer": 3}\n')
    flags = [f"--model=hf:{exported}", f"--task=jsonl:{data}", "--verifiers=1"]
    begun(flags, tmp_path / "first", monkeypatch)
    bare = shutil.copytree(exported, tmp_path / "bare")
    (bare / "generation_config.json").unlink()
    weights = f"--weights={tmp_path / 'first'}"
    begun([f"--model=hf:{bare}", *flags[1:], weights], tmp_path / "second", monkeypatch)
    to = tmp_path / "again"
    assert export.main([str(tmp_path / "second"), "--to", str(to)]) == 0
    assert {p.name: p.read_bytes() for p in to.iterdir()} == {
        p.name: p.read_bytes() for p in exported.iterdir()
    }


@pytest.mark.slow
def test_another_step_in_bfloat16(chat_run, tmp_path, capsys):
    run, weights = chat_run
    to = tmp_path / "model"
    assert export.main([str(run), "--to", str(to), "--step=3", "--dtype=bfloat16"]) == 0
    assert "parameters in bfloat16" in (out := capsys.readouterr().out) and "after step 3" in out
    config, found = huggingface.load(to, mesh_of("dp1"))
    assert config.dtype == "bfloat16"
    rounded = jax.tree.map(lambda leaf: (2 * leaf).astype(jnp.bfloat16), weights)
    chex.assert_trees_all_equal(found, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=5"], r"step=5 has no checkpoint in .*: there are 3, 7"),
        (["--merge"], r"merge=True has nothing to merge: .* Leave out --merge"),
        (["--architecture=MixtralForCausalLM"], r"MixtralForCausalLM does not support"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(flags, message, chat_run, tmp_path, capsys):
    assert export.main([str(chat_run[0]), "--to", str(tmp_path / "model"), *flags]) == 2
    assert re.search(message, one_line(capsys.readouterr()))
    assert os.listdir(tmp_path) == []


def test_folders_are_made_and_files_are_as_readable_as_any(chat_run, tmp_path):
    before = os.umask(0o022)
    try:
        to = tmp_path / "new" / "child"
        assert export.main([str(chat_run[0]), "--to", str(to)]) == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in to.iterdir()} == {0o644}


def test_nothing_is_written_over(chat_run, exported, capsys):
    before = {path: path.read_bytes() for path in exported.iterdir()}
    assert export.main([str(chat_run[0]), "--to", str(exported)]) == 2
    assert "already exists: choose a new folder" in one_line(capsys.readouterr())
    assert {path: path.read_bytes() for path in exported.iterdir()} == before


def test_an_export_that_fails_leaves_nothing(chat_run, tmp_path, monkeypatch):
    seen = []

    def full(tensors, path, **options):
        seen.append(sorted(entry.name for entry in path.parent.iterdir()))
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    assert export.main([str(chat_run[0]), "--to", str(tmp_path / "model")]) == 1
    # Until the last file is there the folder has another name and no config.json.
    assert "tokenizer.json" in seen[0] and "config.json" not in seen[0]
    assert os.listdir(tmp_path) == []


def test_a_template_of_the_run_takes_the_place_of_the_checkpoints(tmp_path):
    copy_checkpoint_files(write_tokenizer(tmp_path / "model"), tmp_path / "kept")
    own = checkpoint_tokenizer(tmp_path / "model", VOCAB_SIZE)
    changed = with_turn_end(own.with_usage(replace(own.usage, chat_template="{{ messages }}")))
    (tmp_path / "out").mkdir()
    for name, content in checkpoint_files(changed, tmp_path / "kept").items():
        (tmp_path / "out" / name).write_bytes(content)
    found = checkpoint_tokenizer(tmp_path / "out", VOCAB_SIZE)
    assert found.usage == changed.usage


@pytest.mark.slow
def test_a_run_with_a_tokenizer_of_its_own(tmp_path, monkeypatch, capsys):
    """The factor on embeddings goes into them, as no architecture has it."""
    given = jax.device_put(random_weights(replace(MICRO, vocab_size=15), 1))
    begin = train_module._load_initial_weights
    monkeypatch.setattr(train_module, "_load_initial_weights", lambda setup: given)
    begun(["--model=micro", "--task=sort"], tmp_path / "run", monkeypatch)
    monkeypatch.setattr(train_module, "_load_initial_weights", begin)
    to = tmp_path / "model"
    assert export.main([str(tmp_path / "run"), "--to", str(to)]) == 0
    assert "SentencePiece model, for which transformers has no class" in capsys.readouterr().out
    own = load_tokenizer(tmp_path / "run" / "tokenizer.model")
    found = checkpoint_tokenizer(to, own.vocab_size)
    assert (found.encode("12"), found.stop_ids, found.prefix) == (
        own.encode("12"),
        own.stop_ids,
        own.prefix,
    )
    config, weights = huggingface.load(to, mesh_of("dp1"))
    assert config.embedding_scale == 1.0
    np.testing.assert_array_equal(weights.embedding, given.embedding * 8**0.5)
    chex.assert_trees_all_equal(weights.layers, given.layers)


@pytest.mark.slow
def test_a_factor_on_embeddings_that_the_architecture_has_stays(tmp_path, monkeypatch):
    """Gemma's, whose head is the embedding: it could not go into the one and not the other."""
    given, task = write_family("gemma3", tmp_path / "given"), tmp_path / "sums.jsonl"
    task.write_text('{"prompt": "1+1?", "answer": 2}\n{"prompt": "1+2?", "answer": 3}\n')
    flags = [f"--model=hf:{given}", f"--task=jsonl:{task}", "--verifiers=1"]
    begun(flags, tmp_path / "run", monkeypatch)
    to = tmp_path / "model"
    assert export.main([str(tmp_path / "run"), "--to", str(to)]) == 0
    (config, weights), (own, expected) = (huggingface.load(x, mesh_of("dp1")) for x in (to, given))
    assert config == own and config.embedding_scale != 1.0
    chex.assert_trees_all_equal(weights, expected)


def test_what_a_killed_export_left_goes_with_the_next(tmp_path):
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    host = socket.gethostname()
    # Names of processes that ended, of one that writes, of another host, and of another place.
    names = [f"to.writing-{host}-{number}" for number in (ended.pid, os.getpid(), os.getppid())]
    kept = [names[2], f"to.writing-not-{host}-{ended.pid}", f"into.writing-{host}-{ended.pid}"]
    for name in {*names, *kept}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    with export._atomic_folder(tmp_path / "to") as place:
        assert place.name == names[1] and not list(place.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"to", *kept}


def test_gguf_file_comes_back_with_the_weights_of_the_folder(exported, chat_run, tmp_path, capsys):
    path = tmp_path / "new" / "run.gguf"
    assert export.main([str(chat_run[0]), "--gguf", str(path)]) == 0
    assert "run.gguf: 0." in capsys.readouterr().out
    assert [each.name for each in path.parent.iterdir()] == ["run.gguf"]
    convert(path, tmp_path / "after")
    before, after = (load_file(f / "model.safetensors") for f in (exported, tmp_path / "after"))
    chex.assert_trees_all_equal(after, before)
    metadata = GgufFile.read(path).metadata
    assert metadata["general.name"] == "run" and metadata["general.base_model.0.name"] == "model"
    quantised = tmp_path / "small.gguf"
    flags = ["--gguf", str(quantised), "--quantise", "q8_0", "--to", str(tmp_path / "folder")]
    assert export.main([str(chat_run[0]), *flags]) == 0
    assert GgufFile.read(quantised).metadata["general.file_type"] == 7
    assert (tmp_path / "folder" / "config.json").exists()


def test_push_copies_into_a_local_folder(exported, chat_run, tmp_path, capsys):
    assert export.main([str(chat_run[0]), "--push", f"file://{tmp_path}/pushed"]) == 0
    assert capsys.readouterr().out.endswith(f"pushed to {tmp_path}/pushed\n")
    pushed = {path.name: path.read_bytes() for path in (tmp_path / "pushed").iterdir()}
    assert pushed == {path.name: path.read_bytes() for path in exported.iterdir()}


def test_push_uploads_with_the_token_of_the_environment(chat_run, monkeypatch, capsys):
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            if repo_id == "OWNER/full":
                raise OSError("402 Payment\nRequired")
            calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    assert export.main([str(chat_run[0]), "--push", "OWNER/run"]) == 0
    assert capsys.readouterr().out.endswith("pushed to https://huggingface.co/OWNER/run\n")
    assert calls[0] == ("OWNER/run", {"private": True, "exist_ok": True})
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {*calls[1][1]}
    monkeypatch.setattr(command_line, "exit_without_waiting", lambda status: None)
    assert export.main([str(chat_run[0]), "--push", "OWNER/full"]) == 1
    message = "push to OWNER/full failed: 402 Payment Required"
    assert message in one_line(capsys.readouterr())
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert export.main([str(chat_run[0]), "--push", "OWNER/run"]) == 2
    assert "needs a token of the Hugging Face Hub" in one_line(capsys.readouterr())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing is to be written: give --to DIR, --gguf FILE or --push NAME"),
        (["--push", "a/b/c"], r"push='a/b/c' must be OWNER/NAME"),
        (["--push", "/"], r"push='/' already exists"),
        (["--to", "x", "--quantise", "q8_0"], r"quantise='q8_0' is for GGUF files"),
        (["--gguf", "/dev/null"], r"gguf='/dev/null' already exists: choose a new file"),
    ],
)
def test_wrong_targets_are_one_line(flags, message, chat_run, capsys):
    assert export.main([str(chat_run[0]), *flags]) == 2
    assert re.search(message, one_line(capsys.readouterr()))


def test_run_with_adapters_pushes_them(tmp_path, monkeypatch, capsys):
    checkpoint_in(tmp_path / "model")
    data, run = tmp_path / "problems.jsonl", tmp_path / "run"
    data.write_text('{"prompt": "1+1?", "answer": 2}\n{"prompt": "1+2?", "answer": 3}\n')
    flags = [f"--model={tmp_path / 'model'}", f"--task=jsonl:{data}", "--verifiers=1"]
    begun([*flags, "--lora-rank=2"], run, monkeypatch)
    capsys.readouterr()
    target = str(tmp_path / "pushed")
    assert export.main([str(run), "--push", target]) == 2
    assert "wait for it, or give --merge" in one_line(capsys.readouterr())
    (run / "adapters").mkdir()
    (run / "adapters" / "adapter_config.json").write_text("{}")
    assert export.main([str(run), "--push", target]) == 0
    assert os.listdir(target) == ["adapter_config.json"]
    assert export.main([str(run), "--gguf", str(tmp_path / "run.gguf")]) == 2
    assert "give --merge for full weights" in one_line(capsys.readouterr())
