"""Measured times from a file, in the roofline's place."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.planner.serving.__main__ import main
from benchmarks.planner.serving.times import read_profile

PAGE = (Path(__file__).parents[3] / "docs" / "serving_plan.md").read_text(encoding="utf-8")
EXAMPLE = re.findall(r"(?s)```json\n(.*?)```", PAGE)[0]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "times.json"


def test_the_file_of_the_page_is_read_profile(file):
    file.write_text(EXAMPLE)
    found = read_profile(file)
    assert {name: [*map(sorted, nodes)] for name, nodes in found.items()} == {
        "h20": [[1], []],
        "l40s": [[], [1, 2]],
    }
    # Two points are a line: its slope is k3, its start k4.
    line, slope = found["l40s"].experts[1], 3.9e-4 / (1368 - 256)
    assert line.slope == pytest.approx(slope)
    assert line.constant == pytest.approx(3.1e-4 - 256 * slope)


def test_plans_are_made_with_what_was_measured(file, capsys):
    points = [[100, 1.5e-4], [300, 3.5e-4]]
    file.write_text(json.dumps({"h20": {"attention": {str(tp): points for tp in (1, 2, 4, 8)}}}))
    flags = ["--hardware", "h20", "--devices", "12", f"--profile={file}"]
    assert main(["dbrx", *flags]) == 0
    out = capsys.readouterr().out
    found = re.search(r"(\d+) x h20 tp\d +\d+ x h20 .*?  (\d) +([\d,]+) +(\d+) us", out)
    assert found is not None, out
    nodes, m, batch, attention = (int(word.replace(",", "")) for word in found.groups())
    # 1 us for a token, and 50 us at all.
    assert attention == batch // (nodes * m) + 50


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "times.json is not JSON: Expecting property name"),
        ("[]", r"times.json: \[\] must be a JSON object"),
        ('{"tpu": {}}', "times.json: 'tpu' is not known: .*h20"),
        ('{"h20": {"router": {}}}', "h20: 'router' is not known: choose among attention, experts"),
        ('{"h20": {"experts": [1]}}', r"h20: experts: \[1\] must be a JSON object"),
        ('{"h20": {"experts": {"tp2": []}}}', "experts: tp2 is not a number of devices"),
        ('{"h20": {"experts": {"0": []}}}', "experts: 0 is not a number of devices"),
        ('{"h20": {"experts": {"1": 3}}}', "1: 3 is not a batch size and its seconds"),
        ('{"h20": {"experts": {"1": [[1]]}}}', r"1: \[1\] is not a batch"),
        ('{"h20": {"experts": {"1": [[8, NaN]]}}}', r"\[8, NaN\] is not a batch"),
        ('{"h20": {"experts": {"1": [[8, true]]}}}', r"\[8, true\] is not a batch"),
        ('{"h20": {"experts": {"1": [[8, 0]]}}}', r"\[8, 0\] is not a batch"),
        ('{"h20": {"experts": {"1": [[8, 1]]}}}', "1: 1 batches and 1 times cannot be fitted"),
        ('{"h20": {"experts": {"1": [[8, 2], [9, 1]]}}}', "1: the fitted time per token is -1 s"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(text, words, file, capsys):
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        read_profile(file)
    assert "\n" not in str(error.value)
