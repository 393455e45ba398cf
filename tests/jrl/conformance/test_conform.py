"""`jrl conform`: strangers' functions, exit status, JSON, and an installation of NumPy alone."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from vectors.generate import usual_settings

from jrl.conformance import RULES, check, quantities
from jrl.conformance.cases import NAMED, USUAL, cases, document
from jrl.conformance.command import main

ROOT = Path(__file__).parents[3]
STRANGER = """
import numpy as np

def loss(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28):
    ratio = np.exp(logprobs - old_logprobs)
    clipped = np.clip(ratio, 1 - clip_low, 1 + clip_high)
    losses = np.where(mask, np.maximum(-advantages * ratio, -advantages * clipped), 0)
    return losses.sum() / {count}
"""
COUNTS = {"right": "max(np.sum(mask), 1)", "wrong": "mask.size"}


@pytest.fixture
def file(tmp_path):
    def written(count):
        path = tmp_path / f"{count}.py"
        path.write_text(STRANGER.replace("{count}", COUNTS[count]))
        return f"{path}:loss"

    return written


def test_right_loss_exits_with_0(file, capsys):
    assert main([file("right"), "--as", "dapo_loss"]) == 0
    assert "another convention" in capsys.readouterr().out  # no clamp


def test_wrong_denominator_exits_with_1_and_shows_its_smallest_input(file, tmp_path, capsys):
    findings, table = tmp_path / "findings.json", tmp_path / "table.md"
    options = ["--json", str(findings), "--markdown", str(table)]
    assert main([file("wrong"), "--as", "dapo_loss", *options]) == 1
    printed = capsys.readouterr().out
    assert "padding, columns under the mask" in printed
    (report,) = json.loads(findings.read_text())
    failing = [case for case in report["cases"] if case["state"] == "misses"]
    smallest = min(failing, key=lambda case: case["example"]["size"])
    shown = printed.partition("smallest failing input: ")[2]
    assert shown.startswith(smallest["name"])
    assert f"right: {smallest['example']['right']}" in shown
    assert "| differs |" in table.read_text()


def test_error_of_a_function_is_a_finding():
    def loss(logprobs, old_logprobs, advantages, mask):
        raise RuntimeError("no such thing")

    report = check(loss, "ppo_loss", "numpy")
    assert report.verdict == "differs"
    assert report.cases[0].reason == "RuntimeError: no such thing"


def test_function_of_other_arguments_is_not_called_right(tmp_path, capsys):
    path = tmp_path / "other.py"
    path.write_text("def loss(x, y): return x")
    assert main([f"{path}:loss", "--as", "ppo_loss"]) == 1
    assert "not expressed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nemo"], "'nemo' must be FILE.py:FUNCTION or one of jrl, openrlhf, trl, verl"),
        (["none.py:f", "--as", "ppo_loss"], "none.py is no file"),
        ([f"{__file__}:absent", "--as", "ppo_loss"], "has no function 'absent'"),
        ([f"{__file__}:main"], "needs --as QUANTITY"),
        ([f"{__file__}:main", "--as", "pop_loss"], "quantity 'pop_loss' is unknown"),
    ],
)
def test_bad_command_line_is_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("name", NAMED)
def test_named_settings_select_cases(name):
    file, fixed = NAMED[name]
    assert 2 <= len(cases(name)) < len(cases(file))
    for case in cases(name):
        assert fixed.items() <= case.settings.items()


def test_usual_settings_are_the_defaults_of_the_rows():
    assert json.loads(USUAL.read_text()) == json.loads(json.dumps(usual_settings()))


def test_quantities_are_the_files():
    assert {document(name)["function"] for name in quantities()} == {*quantities()} - {*NAMED}
    assert len(RULES) >= 15


def test_package_needs_no_jax():
    blocked = "import sys; sys.modules['jax'] = sys.modules['jaxtyping'] = None; "
    run = (
        "from jrl.conformance import cases, check, quantities; "
        "print(sum(len(cases(name)) for name in quantities()) > 700); "
        "print({*sys.modules} & {'jrl.losses', 'torch', 'rich', 'tyro'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked + run], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "set()"]


@pytest.mark.slow
def test_distribution_has_numpy_alone_and_runs(file, tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    where = ["--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT / "conformance")]
    subprocess.run([*pip, "wheel", *where], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        metadata = next(name for name in names if name.endswith("METADATA"))
        needs = [line for line in packed.read(metadata).decode().splitlines() if "Requires" in line]
        packed.extractall(tmp_path / "site")
    assert needs == ["Requires-Python: >=3.11", "Requires-Dist: numpy>=2"]
    inside = {name for name in names if name.startswith("jrl_conformance/")}
    kept = (ROOT / "jrl" / "conformance").rglob("*.*")
    assert inside == {
        f"jrl_conformance/{path.relative_to(ROOT / 'jrl' / 'conformance')}"
        for path in kept
        if path.suffix in (".py", ".json")
    }
    hidden = "import sys, runpy; sys.modules.update(dict.fromkeys(['jax', 'jrl', 'torch'])); "
    run = "runpy.run_module('jrl_conformance', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", hidden + run, file("right"), "--as", "dapo_loss"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "another convention" in done.stdout
