"""`python -m sharding.folding`: what it prints, what it refuses, and that it needs no device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from sharding.folding import Layout
from sharding.folding.__main__ import main
from sharding.folding.groups import describe

ROOT = Path(__file__).parents[3]
SIXTEEN = "tp2 cp2 dp2 pp2 / ep4 etp1"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where JAX would fail if it were asked for a device."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "sharding.folding", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_groups_are_printed_without_any_device():
    done = command(SIXTEEN)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == describe(Layout.parse(SIXTEEN)) + "\n"


@pytest.mark.slow
def test_an_illegal_layout_is_refused_on_one_line():
    done = command("tp4 dp2 / ep3 etp2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: ep=3 x etp=2 does not divide tp x cp x dp = 8: "
        "the nearest legal are ep=4 etp=2 or ep=2 etp=2 or ep=4 etp=1.\n"
    )


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("tp2 xp2", "axes among tp, cp, dp, pp, ep, etp, vpp, edp."),
        ("tp2 tp2", "names the axis tp twice."),
        ("tp0", "tp=0 must be at least 1: use 1 for an unused axis."),
        ("dp2 vpp2", "vpp=2 (interleaved pipeline chunks) needs pp of at least 2, not pp=1"),
        ("dp4 / ep2 edp4", "but the other sizes leave edp=2: leave it out."),
    ],
)
def test_folding_command_prints_the_reason(layout, reason, capsys):
    assert main([layout]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert reason in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_folding_command_prints_the_picture(tmp_path, capsys):
    path = tmp_path / "folding.png"
    assert main([SIXTEEN, "--picture", str(path)]) == 0
    height, width, _ = imread(path).shape
    assert width > height > 400
    assert main([SIXTEEN, "--picture", str(tmp_path / "folding.xyz")]) == 2
    assert main([SIXTEEN, "--picture", str(tmp_path / "nowhere" / "folding.png")]) == 2
    refused = capsys.readouterr().err.splitlines()
    assert len(refused) == 2
    assert "xyz" in refused[0]
    assert "nowhere" in refused[1]


def test_folding_page_shows_the_output():
    page = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
    result = re.search(r'\$ python -m sharding.folding "(.+?)".*\n((?:.+\n)+?)```', page)
    assert result is not None
    assert result[2] == describe(Layout.parse(result[1])) + "\n"
