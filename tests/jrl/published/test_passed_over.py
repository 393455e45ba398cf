"""Files of a checkpoint's folder that hold again what others hold."""

import json

import pytest
from served import write_checkpoint

from jrl.published.network import open_checkpoint
from jrl.published.passed_over import files_passed_over
from jrl.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def vocabulary(folder, **changed):
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    return json.dumps({**pipeline["model"]["vocab"], **changed})


@pytest.mark.parametrize(
    ("files", "phrases"),
    [
        ({}, []),
        (
            {"model.gguf": "x", "pytorch_model.bin": "x"},
            [
                "model.gguf (model.safetensors is read)",
                "pytorch_model.bin (model.safetensors is read)",
            ],
        ),
        (
            {"chat_template.jinja": "other"},
            ["chat_template of tokenizer_config.json, which differs (chat_template.jinja is read)"],
        ),
        ({"vocab.json": lambda folder: vocabulary(folder)}, []),
        (
            {"vocab.json": lambda folder: vocabulary(folder, a=7)},
            ["vocab.json, which differs (tokenizer.json is read: 'a' is 64 there and 7 here)"],
        ),
        (
            {"tokenizer.model": lambda _: Tokenizer.train_characters("ab").vocabulary()},
            ["tokenizer.model, which differs (tokenizer.json is read: 'a' is 64 there and 4 here)"],
        ),
        ({"tokenizer.model": "of tiktoken"}, []),
    ],
)
def test_files_that_are_not_read_are_named_with_the_one_that_is(folder, files, phrases):
    for name, content in files.items():
        content = content if isinstance(content, str) else content(folder)
        if isinstance(content, dict):
            (content,) = content.values()
        content = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(content)
    assert files_passed_over(folder) == phrases


def test_opening_a_checkpoint_prints_them(folder, capsys):
    open_checkpoint(str(folder))
    assert "passed over in" not in capsys.readouterr().out
    (folder / "model.gguf").write_text("x")
    open_checkpoint(str(folder))
    line = f"passed over in {folder}: model.gguf (model.safetensors is read)\n"
    assert capsys.readouterr().out == line
