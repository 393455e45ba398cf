"""`python -m benchmarks.planner.serving`: what it prints and refuses."""

import re

import pytest
from matplotlib.image import imread

from benchmarks.planner.serving.__main__ import main


def test_a_server_is_planned_and_drawn(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    given = ["mixtral-8x7b", "--hardware", "h100", "--devices", "12", "--slo", "0.1s"]
    assert main([*given, "--avg-seq", "900", "--picture", str(picture)]) == 0
    first, _, titles, row, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith(
        "8 experts, 2 per token; 900 cached tokens per sequence, 100 ms between tokens"
    )
    assert titles.split()[:3] == ["attention", "experts", "m"]
    assert re.match(r"\d+ x h100 tp\d", row)
    said = "\n".join(rest)
    for constraint in range(1, 9):
        assert f"({constraint}) " in said
    for words in ("Drawbacks of neighbouring plans:", "Gain over co-located plans", "two batches"):
        assert words in said
    assert imread(picture).shape[1] > 500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware", "h100x8"], "needs a list of different device types without"),
        (["--hardware", "h20,h20"], "needs a list of different device types without"),
        (["--hardware", "h20,h100"], "h100 has no price to compare"),
        (["--hardware", "h20,h100", "--price", "h100"], "is not a device type and a price above 0"),
        (["--hardware", "h20", "--slo", "150"], "--slo 150 is not a time above 0"),
        (["--hardware", "h20", "--slo", "1ms"], "no plan on h20:h20 keeps 1 ms"),
        (["--hardware", "h20", "--devices", "1"], "--devices 1 must be at least 2"),
        (["--hardware", "h20", "--prompt", "0"], "prompt=0 must be above 0"),
        (["--hardware", "h20", "--network", "no/such/file"], "No such file"),
    ],
)
def test_what_no_server_is_planned_for_is_refused_on_one_line(arguments, words, capsys):
    assert main(["mixtral-8x7b", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert words in told.err


def test_a_device_of_ones_own_is_read_from_a_file(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"like": "h100", "memory": 141e9, "outside": 25e9}')
    assert main(["mixtral-8x7b", "--hardware", f"{file},h20", "--devices", "12"]) == 2
    assert "mine has no price to compare it with" in capsys.readouterr().err
    file.write_text('{"like": "h100", "price": 3}')
    assert main(["mixtral-8x7b", "--hardware", f"{file},h20", "--devices", "12"]) == 0
    assert re.search(r"x mine tp\d", capsys.readouterr().out)
