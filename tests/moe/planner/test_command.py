"""`python -m moe.planner`: what it prints and refuses, and that it needs no device."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from runpy import run_module

import pytest
from matplotlib.image import imread

from moe.planner import __main__ as command
from moe.planner.__main__ import main, parse_count
from sharding.costs.hardware import HARDWARE, Hardware, parse, read_hardware

ROOT = Path(__file__).parents[3]
MEGATRON = ("--program", "megatron-core")


@pytest.mark.slow
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
    for words in ("Memory of the first", "Drawbacks of neighbouring layouts:", "layouts fit"):
        assert words in printed
    assert imread(picture).shape[1] > 500


@pytest.mark.slow
def test_wires_and_chunks_may_be_left_to_the_search(capsys):
    """Over slow links the best layout sends tokens in FP8, gradients in bfloat16."""
    given = ["mixtral-8x7b", "--hardware", "l40sx32", "--tokens", "256K", "--top", "1"]
    wires = ["--activation-wire", "none", "float8_e4m3fn", "--gradient-wire", "float32", "bfloat16"]
    assert main([*given, *wires, "--expert-chunks", "1", "2"]) == 0
    printed = capsys.readouterr().out
    assert "The first layout sends gradients in bfloat16." in printed
    assert re.search(r"all_(to_all|gather) fp8 x2 ", printed)


@pytest.mark.slow
def test_overlap_is_taken_where_a_run_can_have_it(capsys):
    given = ["mixtral-8x7b", "--hardware", "h100x32", "--tokens", "1M", "--top", "400"]
    assert main([*given, "--two-batch-overlap", "--overlap-grad-reduce"]) == 0
    printed = capsys.readouterr().out
    halved = [line for line in printed.splitlines() if " in two batches " in line]
    assert halved and not any(re.search(r" 1 in two batches", line) for line in halved)
    first = printed.splitlines()[3]
    assert ("reduces gradients inside the backward pass." in printed) == (" pp1 " in first)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["mixtral-8x7b", "--hardware", "h100x8", *MEGATRON, "--two-batch-overlap"],
            "--two-batch-overlap is only for --program jrl",
        ),
        (["mixtral-8x7b", "--hardware", "h100x8", "--expert-chunks", "0"], "0 must be at least 1"),
        (
            ["mixtral-8x7b", "--hardware", "h100x8", *MEGATRON, "--gradient-wire", "bfloat16"],
            "--gradient-wire bfloat16 is only for --program jrl",
        ),
        (["mixtral-8x22b", "--hardware", "h100x8"], "no layout fits on h100x8"),
        (["mixtral", "--hardware", "h100x8"], "neither a checkpoint nor one of mixtral-8x22b"),
        (["mixtral-8x7b", "--hardware", "h100"], "write for example h100x64"),
        (["mixtral-8x7b", "--hardware", "h100x8", "--tokens", "4G"], "write for example 4M"),
        (
            ["mixtral-8x7b", "--hardware", "h100x8", "--tokens", "5000"],
            "is not a multiple of --seq",
        ),
        (["mixtral-8x7b", "--hardware", "h100x7", "--tokens", "16K"], "is valid|no layout fits"),
    ],
)
def test_command_refuses_wrong_arguments_in_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert re.search(f"^error: .*({words})", told.err), told.err


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def search(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "search", search)
    assert main(["mixtral-8x7b", "--hardware", "h100x8"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.slow
def test_a_reader_that_exits_ends_the_command_without_a_message(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["mixtral-8x7b", "--hardware", "h100x16", "--tokens", "256K", *MEGATRON]) == 1
    assert capsys.readouterr().err == ""


def test_serving_names_its_command(capsys):
    assert main(["mixtral-8x7b", "--serve", "--hardware", "h100"]) == 2
    assert "run python -m benchmarks.planner.serving mixtral-8x7b." in capsys.readouterr().err


def test_former_command_names_the_present_one():
    with pytest.raises(SystemExit, match=r"error: .* run python -m moe.planner"):
        run_module("sharding.planner", run_name="__main__")
    with pytest.raises(ImportError, match=r"sharding.planner is now moe.planner"):
        import_module("sharding.planner.search")


@pytest.mark.parametrize(
    ("device", "watts", "share"),
    [
        ("h100", 700, 1.0),
        ("h100", 500, 0.894),
        # Above the device's own power nothing is faster.
        ("h100", 900, 1.0),
        ("a100", 200, 0.794),
        ("b200", 600, 0.843),
    ],
)
def test_power_limit_slows_products_alone(device, watts, share, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"like": device, "power_limit": watts}))
    found, full = read_hardware(file), HARDWARE[device]
    assert found.peak / full.peak == pytest.approx(share, abs=1e-3)
    assert replace(found, peak=full.peak, name=full.name) == full


def test_a_cluster_of_ones_own_is_read_from_a_file(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"like": "h100", "memory": 141e9, "outside": 25e9}')
    mine = HARDWARE["h100"].__dict__ | {"name": "mine", "memory": 141e9, "outside": 25e9}
    assert parse(f"{file} x16") == parse(f"{file}x16") == (Hardware(**mine), 16)
    given = ["mixtral-8x7b", "--tokens", "64K", "--top", "1", "--program", "megatron-core"]
    assert main([*given, "--hardware", str(file), "x16"]) == 0
    assert f"16 x 4,096 tokens on {file} x16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[3]", "holds no object"),
        ('{"like": "abacus"}', "like='abacus' is not known: use one of h100"),
        ('{"like": "h100", "flops": 1}', "'flops' is not known: use like, power_limit, name, peak"),
        ('{"peak": 1e15, "domain": 8}', "lacks memory, memory_bandwidth, inside, outside"),
        ('{"like": "h100", "domain": 8.5}', "domain=8.5 must be a whole number of devices above 0"),
        ('{"like": "h100", "peak": "1e15"}', "peak='1e15' must be a number of SI units above 0"),
        (
            '{"like": "h100", "latency_inside": -1}',
            "latency_inside=-1 must be a number of SI units",
        ),
        ('{"like": "h100", "overlaps": 1}', "overlaps=1 must be true or false"),
        ('{"like": "h100", "name": 7}', "name=7 must be text"),
        (
            '{"like": "h100", "power_limit": 0}',
            "power_limit=0 must be a number of SI units above 0",
        ),
        ('{"like": "h100", "power_limit": "500 W"}', "power_limit='500 W' must be a number"),
        ('{"like": "h20", "power_limit": 300}', "mine has its full rate are not known: give power"),
    ],
)
def test_a_file_that_describes_no_device_is_refused_on_one_line(text, words, capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(text)
    assert main(["mixtral-8x7b", "--hardware", str(file), "x16"]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert (told.out, len(told.err.splitlines())) == ("", 1)


def test_numbers_of_tokens():
    assert [parse_count(text) for text in ("4M", "8K", "4096")] == [4 * 2**20, 8 * 2**10, 4096]


@pytest.mark.slow
def test_no_device_is_asked_for():
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-m", "moe.planner"),
            *("mixtral-8x7b", "--hardware", "h100x16", "--tokens", "64K"),
        ],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
