"""Small runs survive faults at random moments, and the campaign tells what does not."""

import json
import re
from pathlib import Path
from random import Random

import pytest
from places import ROOT

from campaign.faults import __main__ as campaign
from campaign.faults.attempt import BY_JAX, End, Event
from campaign.faults.disturbed import Try
from campaign.faults.judging import prompts_difference, wrong_ends
from campaign.faults.machines import Unavailable, check_disk, check_link
from campaign.faults.moments import draw_moment, rhythm_of
from campaign.faults.settings import STEPS

EVENTS = [
    Event(100.0 + 0.5 * number + late, 0, phase, 1 + number)
    for number in range(STEPS)
    for late, phase in ((0.0, "step"), (0.1, "rollout"), (0.4, "update"))
]
LOST = ("error: another process of the run has ended or cannot be reached: Gloo",)


def test_moments_are_in_the_run():
    rhythm = rhythm_of(97.0, EVENTS)
    assert rhythm.start == 3.5 and rhythm.step == pytest.approx(0.5)
    assert rhythm.phases == pytest.approx({"step": 0.1, "rollout": 0.3, "update": 0.1})
    draw = Random(0)
    moments = [draw_moment(draw, rhythm, 2, 4, at_start=True) for _ in range(200)]
    assert {moment.process for moment in moments} == {0, 1}
    assert {moment.phase for moment in moments} == {"start", *rhythm.phases}
    assert {moment.step for moment in moments if moment.phase != "start"} == {4, 5, 6}
    assert draw_moment(Random(1), rhythm, 2, STEPS, at_start=False).step == STEPS
    assert moments == [draw_moment(Random(0), rhythm, 2, 4, at_start=True), *moments[1:]]


def test_a_lost_prompt_is_no_doubled_one():
    expected = {step: ["1+2=", "1+2=", "3+4=", "3+4="] for step in range(1, STEPS + 1)}
    assert prompts_difference(dict(expected), expected) is None
    found = expected | {3: ["1+2=", "1+2=", "1+2=", "1+2="]}
    reason = "step 3 lost the prompts ['3+4=', '3+4='] and has ['1+2=', '1+2='] too many"
    assert prompts_difference(found, expected) == reason


@pytest.mark.parametrize(
    ("other", "wrong"),
    [
        (End(1, LOST, True), None),
        (End(1, (*LOST, *LOST), True), "process 1 ended with status 1 and said"),
        (End(1, (), True), "process 1 ended with status 1 and said: nothing"),
        (End(-6, LOST, True), "process 1 ended with status -6"),
        (End(-6, (f"F1127 client.h:80] {BY_JAX}.",), True), None),
        (End(1, ("Traceback (most recent call last):",), True), "process 1 ended with a traceback"),
        (End(-9, (), False), "process 1 did not end by itself"),
    ],
)
def test_each_process_ends_by_itself_with_one_line(other, wrong):
    killed = End(-9, (), True)
    reason = wrong_ends([killed, other], {0}, set(), is_watched=True)
    assert reason is None if wrong is None else reason is not None and reason.startswith(wrong)


def test_campaign_table_counts_the_record(tmp_path, capsys):
    common = {"kind": "kill", "processes": 2, "seed": 0, "run": 0, "link": False}
    tries = [(True, 3.0), (True, None), (False, 5.0)]
    lines = [common | {"survived": survived, "seconds_lost": lost} for survived, lost in tries]
    lines.append(common | {"kind": "cut", "link": True, "survived": True, "seconds_lost": 12.0})
    record = tmp_path / "record.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert campaign.main(["--table", str(record)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [
        "| `kill -9` of a process | 2 | 3 | 2 | 4.0, 5.0 |",
        "| link cut for 10 s | 2, two network namespaces | 1 | 1 | 12.0, 12.0 |",
    ]


def test_a_record_names_files_relative_to_the_folder_of_the_campaign(tmp_path):
    one = Try("garbage", 2, False, 0, 0, "a moment", 3, refused=f"error: {tmp_path}/run/m.jsonl:1")
    campaign._write(tmp_path / "record.jsonl", [one, one], tmp_path)
    refused = [each["refused"] for each in campaign._records(tmp_path / "record.jsonl")]
    assert refused == ["error: run/m.jsonl:1"] * 2


def test_the_page_has_the_table_of_the_tries():
    """If this fails, put in what `python -m campaign.faults --table FILE` prints."""
    record = Path(campaign.__file__).with_name("tries.jsonl")
    page = (ROOT / "campaign" / "README.md").read_text()
    assert campaign.table(campaign._records(record)) in page
    assert not re.search(r'[ "]/', record.read_text()), "a path of the machine that ran it"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--link"], "--link connects two processes, not 1: give --processes 2"),
        (["--table", "missing.jsonl"], "No such file or directory: 'missing.jsonl'"),
    ],
)
def test_bad_input_is_one_line(arguments, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        campaign.main(arguments)
    assert line in capsys.readouterr().err.splitlines()[-1]


def test_kinds_that_no_run_can_meet_are_no_success(tmp_path, capsys):
    folder = ["--keep", str(tmp_path)]
    assert campaign.main([*folder, "--kinds", "cut", "--processes", "2"]) == 2
    assert campaign.main([*folder, "--kinds", "cut"]) == 2
    said = capsys.readouterr().out.splitlines()
    assert said == ["cut: skipped: needs --link", "cut: skipped: is for 2 processes"]


def run(record, *arguments):
    """Tries of the command, each of which survived."""
    assert campaign.main([*arguments, "--record", str(record)]) == 0
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.slow
def test_kinds_that_a_process_alone_survives(tmp_path):
    kinds = "kill,clock,checkpoint,verifier,garbage"
    arguments = ["--kinds", kinds, "--tries", "1", "--seed", "3"]
    tries = run(tmp_path / "record.jsonl", *arguments)
    assert [each["kind"] for each in tries] == kinds.split(",")
    # Nothing is left to do.
    assert run(tmp_path / "record.jsonl", *arguments) == tries


@pytest.mark.slow
def test_two_processes_survive_a_killed_and_a_stopped_one(tmp_path):
    tries = run(tmp_path / "record.jsonl", "--processes", "2", "--kinds", "kill,stop", "--tries=1")
    assert [each["kind"] for each in tries] == ["kill", "stop"]


@pytest.mark.slow
def test_disks(tmp_path):
    needs(check_disk)
    kinds = "full,read-only,slow"
    tries = run(tmp_path / "record.jsonl", "--kinds", kinds, "--tries", "1", "--seed", "1")
    assert [each["kind"] for each in tries] == kinds.split(",")


@pytest.mark.slow
def test_links(tmp_path):
    needs(check_link)
    tries = run(
        tmp_path / "record.jsonl",
        "--link",
        "--processes=2",
        "--kinds=cut,cut-for-good",
        "--tries=1",
    )
    assert [each["kind"] for each in tries] == ["cut", "cut-for-good"]


def needs(check):
    try:
        check()
    except Unavailable as reason:
        pytest.skip(str(reason))
