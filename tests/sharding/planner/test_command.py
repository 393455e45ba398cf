"""`python -m sharding.planner`: what it prints and refuses, and that it needs no device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from sharding.planner.__main__ import main, number

ROOT = Path(__file__).parents[3]
MEGATRON = ("--program", "megatron-core")


def test_the_best_layouts_are_printed_and_drawn(capsys, tmp_path):
    picture = tmp_path / "plans.png"
    given = ["mixtral-8x7b", "--hardware", "h100x16", "--tokens", "256K", "--top", "3"]
    assert main([*given, "--program", "megatron-core", "--picture", str(picture)]) == 0
    printed = capsys.readouterr().out
    first, _, titles, *rows = printed.splitlines()
    assert first.startswith("mixtral-8x7b: 46.7 B parameters")
    assert "64 x 4,096 tokens on h100x16" in first
    assert titles.split()[:4] == ["layout", "dispatch", "context", "remat"]
    assert rows[0].startswith("tp") and rows[2].startswith("tp") and not rows[3]
    for words in ("Memory of the first", "Why not its neighbours:", "layouts fit"):
        assert words in printed
    assert imread(picture).shape[1] > 500


def test_wires_and_chunks_may_be_left_to_the_search(capsys):
    """What sends half is taken where links are slow, and said."""
    given = ["mixtral-8x7b", "--hardware", "l40sx32", "--tokens", "256K", "--top", "1"]
    wires = ["--activation-wire", "none", "float8_e4m3fn", "--gradient-wire", "float32", "bfloat16"]
    assert main([*given, *wires, "--expert-chunks", "1", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Gradients of the first are sent in bfloat16." in printed
    assert re.search(r"ragged fp8 x2|all_gather fp8 x2| - ", printed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mixtral-8x7b", "--hardware", "h100x8", "--expert-chunks", "0"], "0 sends nothing"),
        (
            ["mixtral-8x7b", "--hardware", "h100x8", *MEGATRON, "--gradient-wire", "bfloat16"],
            "--gradient-wire bfloat16 is of --program jrl",
        ),
        (["mixtral-8x22b", "--hardware", "h100x8"], "nothing fits on h100x8"),
        (["mixtral", "--hardware", "h100x8"], "neither a checkpoint nor one of mixtral-8x22b"),
        (["mixtral-8x7b", "--hardware", "h100"], "write for example h100x64"),
        (["mixtral-8x7b", "--hardware", "h100x8", "--tokens", "4G"], "write for example 4M"),
        (["mixtral-8x7b", "--hardware", "h100x8", "--tokens", "5000"], "not whole sequences"),
        (["mixtral-8x7b", "--hardware", "h100x7", "--tokens", "16K"], "is legal|nothing fits"),
    ],
)
def test_what_has_no_answer_is_refused_on_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert re.search(words, told.err), told.err


def test_numbers_of_tokens():
    assert [number(text) for text in ("4M", "8K", "4096")] == [4 * 2**20, 8 * 2**10, 4096]


@pytest.mark.slow
def test_no_device_is_asked_for():
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "sharding.planner"),
            *("mixtral-8x7b", "--hardware", "h100x16", "--tokens", "64K"),
        ],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
