"""Paths below the home folder that no shell expands: after a prefix or an equals sign, in a
settings file."""

import json

from jrl.config.evaluation import EvaluateOptions
from jrl.config.run import RunConfig
from jrl.config.settings_file import read_settings
from jrl.published.location import checkpoint_folder, gguf_file, is_checkpoint, prepare_checkpoint
from jrl.runs.directory import storage_path
from jrl.runs.folder import RunFolder
from jrl.tasks.data.files import kind_of, read_records
from jrl.tasks.references import parse_reference
from jrl.text.load import load_tokenizer
from jrl.text.prompt_format import template_file, with_template
from jrl.text.tokenizer import Tokenizer


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a"}))
    (tmp_path / "own.py").write_text("def f(): pass")
    (tmp_path / "run.yaml").write_text("steps: 2")
    (tmp_path / "data").mkdir()
    (tmp_path / "model").mkdir()
    for name in ("config.json", "a.safetensors", "a.gguf"):
        (tmp_path / "model" / name).touch()
    assert [record for _, record in read_records("jsonl", "~/a.jsonl")] == [{"prompt": "a"}]
    assert kind_of("~/data") == "dataset"
    assert parse_reference("~/own.py:f").file == str(tmp_path / "own.py")
    assert is_checkpoint("~/model")
    for name in ("~/model", "hf:~/model"):
        assert checkpoint_folder(name) == prepare_checkpoint(name) == tmp_path / "model"
        assert RunConfig(model=name).checkpoint == str(tmp_path / "model")
    assert gguf_file("gguf:~/model/a.gguf") == tmp_path / "model" / "a.gguf"
    assert RunFolder("~/runs/a").path == tmp_path / "runs" / "a"
    assert storage_path("~/checkpoints") == tmp_path / "checkpoints"
    Tokenizer.train_characters("0123").save(tmp_path / "tokenizer.model")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    tokenizer = load_tokenizer("~/tokenizer.model")
    run = RunConfig(tokenizer="~/tokenizer.model", chat_template="~/chat.jinja")
    assert with_template(run, tokenizer).usage.chat_template == "{{ messages[0].content }}"
    run = RunConfig(tokenizer="~/tokenizer.model")
    assert template_file(run) == str(tmp_path)
    EvaluateOptions("runs/a", json="~/new/results.json").check()
    assert (tmp_path / "new").is_dir()
    assert read_settings("~/run.yaml").values == {"steps": 2}
