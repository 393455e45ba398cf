"""Studies: what is run, what is read of it, and the numbers between two evaluations."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from places import ROOT
from tiers import full_but

import experiments.conversations.run as conversations
import experiments.tppo_efficiency.run as windows
from experiments.commands import complete
from experiments.figures import draw_curves, draw_finals, final_table, spread
from experiments.study import Curve, Study, _run, arguments_of, folder_of, read, write
from jrl.config.flags import parse_arguments

FOLDERS = sorted(path.parent.name for path in ROOT.glob("experiments/*/run.py"))
QUICK = ("staleness",)


def curve(seed=0, accuracy=(0.2, 0.4, 0.3, 0.6)):
    spent = [0.0, 10.0, 20.0, 40.0]
    numbers = {name: spent for name in ("step", "sampled_tokens", "decode_steps", "seconds")}
    return Curve("a", seed, {**numbers, "accuracy": list(accuracy), "actor/entropy": spent})


def test_numbers_between_evaluations():
    one = curve()
    assert one.final == pytest.approx(0.45)
    assert [one.at("seconds", x) for x in (0, 5, 10, 30, 99)] == pytest.approx(
        [0.2, 0.3, 0.4, 0.45, 0.6]
    )
    assert one.until(0.3, "seconds") == pytest.approx(5)
    assert one.until(0.45, "seconds") == pytest.approx(30)
    assert one.until(0.1, "seconds") == 0
    assert one.until(0.7, "seconds") is None


def ended(folder, lines, steps=None):
    """A run with plots: one that was stopped on the way, if it has more steps to go."""
    (folder / "plots").mkdir(parents=True)
    steps = lines[-1]["step"] if steps is None else steps
    (folder / "config.json").write_text(json.dumps({"run": {"steps": steps}}), encoding="utf-8")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_results_are_totals_since_the_warm_start_and_means_since_the_last_evaluation(tmp_path):
    study = Study(tmp_path, {"b": "grpo", "a": "ppo"}, metrics=["actor/entropy"], seeds=[0])
    step = {"perf/sampled_tokens": 5.0, "perf/decode_steps": 3.0, "perf/time_per_step": 0.5}
    lines = [
        {"step": 0, "val/accuracy/sampled": 0.25, "actor/entropy": 9.0},
        {"step": 1, **step, "actor/entropy": 1.0},
        {"step": 2, **step, "actor/entropy": 2.0, "val/accuracy/sampled": 0.5},
        {"step": 3, **step, "val/accuracy/sampled": 0.75},
    ]
    ended(folder_of(study, "a", tmp_path, 0), lines)
    ended(folder_of(study, "b", tmp_path, 0), lines[:3])
    study = replace(study, seeds=[0, 1])
    ended(folder_of(study, "b", tmp_path, 1), lines[:3], steps=3)
    unfinished = folder_of(study, "a", tmp_path, 1)
    unfinished.mkdir()
    write(study, tmp_path)
    first, second = read(study)
    assert [first.variant, second.variant] == ["b", "a"] and len(first.accuracy) == 2
    assert second.numbers["step"] == [0, 2, 3] and second.accuracy == [0.25, 0.5, 0.75]
    assert second.numbers["sampled_tokens"] == [0, 10, 15]
    assert second.numbers["decode_steps"] == [0, 6, 9]
    assert second.numbers["seconds"] == [0, 1, 1.5]
    entropy = second.numbers["actor/entropy"]
    assert entropy[1] == 1.5 and math.isnan(entropy[0]) and math.isnan(entropy[2])


@pytest.mark.parametrize(
    "folder",
    full_but([name for name in FOLDERS if name not in ("recipes", "conversations")], *QUICK),
)
def test_every_variant_is_a_command_that_training_takes(folder, tmp_path):
    study = importlib.import_module(f"experiments.{folder}.run").STUDY
    assert study.folder == ROOT / "experiments" / folder
    assert len(set(study.variants.values())) == len(study.variants) >= 2
    for variant, line in study.variants.items():
        request = parse_arguments(arguments_of(study, variant, tmp_path, 2))
        assert request.recipe.name == line.split()[0]
        assert request.run.seed == 2 and request.recipe.completions == 128


def test_the_page_of_windows_has_the_tables_of_its_results():
    curves = read(windows.STUDY)
    page = (windows.FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"\n{windows.table(curves)}\n" in page
    assert f"\n{windows.until_table(curves)}\n" in page


def test_study_compares_cost_to_accuracy_by_seed():
    def run(variant, seed, accuracy, scale):
        spent = [scale * x for x in (0.0, 6e3, 12e3)]
        numbers = {name: spent for name in ("step", "decode_steps", "seconds")}
        return Curve(variant, seed, {**numbers, "accuracy": [0.3, accuracy, accuracy]})

    complete = [run(windows.COMPLETE, seed, 0.38, 1 + seed) for seed in (0, 1)]
    some = [run("window", 0, 0.38, 0.5), run("window", 1, 0.36, 1.0)]
    lines = windows.until_table([*complete, *some]).splitlines()
    assert [line.split(" | ")[1:] for line in lines[2:]] == [
        ["complete rollouts", "2 of 2", "9.0 (6.0 to 12.0)", "1", "150.0 (100.0 to 200.0)", "1 |"],
        [
            "window",
            "1 of 2",
            *["3.0 (3.0 to 3.0)", "2.00 (2.00 to 2.00)"],
            *["50.0 (50.0 to 50.0)", "2.00 (2.00 to 2.00) |"],
        ],
        ["complete rollouts", "0 of 2", "-", "1", "-", "1 |"],
        ["window", "0 of 2", *["-", "-"], *["-", "- |"]],
    ]


def test_both_tasks_of_conversations_are_commands_that_training_takes(tmp_path):
    for task in conversations.TASKS:
        _, module, program, *arguments = conversations.command(task, 1, tmp_path)
        request = parse_arguments(arguments)
        assert (module, program) == ("-m", "jrl.train")
        assert (request.run.task, request.run.seed) == (task, 1)
        assert request.run.steps == conversations.STEPS


def test_the_page_of_conversations_has_the_table_of_its_results(tmp_path, monkeypatch):
    lines = conversations.read()
    page = (conversations.FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"\n{conversations.table(lines)}\n" in page
    conversations.draw(lines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
    monkeypatch.setattr(conversations, "RESULTS", tmp_path / "results.csv")
    conversations.write(lines)
    assert conversations.read() == lines


def test_a_run_that_has_ended_is_left_and_one_that_fails_names_its_log(tmp_path):
    study = Study(tmp_path, {"a": "grpo"})
    ended(folder_of(study, "a", tmp_path, 0), [{"step": 60}])
    _run(arguments_of(study, "a", tmp_path, 0))
    with pytest.raises(SystemExit, match=r"grpo .* failed: see .*\.log$"):
        _run(arguments_of(study, "a", tmp_path, 1))
    log = folder_of(study, "a", tmp_path, 1).with_suffix(".log").read_text(encoding="utf-8")
    assert "warm-start-1 holds no run" in log


def test_study_resumes_a_stopped_run(tmp_path, monkeypatch):
    """It has its plots, and ends with status 0."""
    study, inputs = Study(tmp_path, {"a": "grpo"}), []
    arguments = arguments_of(study, "a", tmp_path, 0)
    folder = folder_of(study, "a", tmp_path, 0)

    def stopped(line):
        inputs.append(line)
        ended(folder, [{"step": 3}], steps=60)
        return 0

    monkeypatch.setattr("experiments.study.main", stopped)
    with pytest.raises(SystemExit, match=r"grpo .* was stopped: see .*\.log$"):
        _run(arguments)

    def completed(line):
        inputs.append(line)
        (folder / "metrics.jsonl").write_text('{"step": 60}\n', encoding="utf-8")
        return 0

    monkeypatch.setattr("experiments.study.main", completed)
    _run(arguments)
    _run(arguments)
    assert inputs == [arguments, ["--run-dir", str(folder), "--resume"]]


def test_no_run_begins_when_the_study_stops(tmp_path, monkeypatch):
    stopping = threading.Event()
    monkeypatch.setattr("experiments.study._Worker.stopping", stopping)
    monkeypatch.setattr("experiments.study.main", lambda line: 3)
    arguments = arguments_of(Study(tmp_path, {"a": "grpo"}), "a", tmp_path, 0)
    with pytest.raises(SystemExit, match="failed"):
        _run(arguments)
    stopping.set()
    _run(arguments)


SAVES = """
import signal, sys, time

def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit()

signal.signal(signal.SIGINT, save)
print("begun", flush=True)
time.sleep(60)
"""
TWO = f"""
import sys
from experiments.commands import complete

complete([sys.executable, "-c", {SAVES!r}])
print("the next one")
"""


@pytest.mark.slow
def test_study_waits_for_saves_on_ctrl_c():
    with subprocess.Popen(
        [sys.executable, "-c", TWO],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (
        130,
        "saved\n",
        "stopped; run the same command to resume\n",
    )


def test_study_reports_a_failing_command_in_one_line():
    complete([sys.executable, "-c", "pass"])
    with pytest.raises(SystemExit, match=r"-c 'raise SystemExit\(2\)' failed$"):
        complete([sys.executable, "-c", "raise SystemExit(2)"])


def test_equal_commands_share_a_run(tmp_path):
    one, other = (Study(tmp_path / name, {name: "dapo"}) for name in "ab")
    assert folder_of(one, "a", tmp_path, 0) == folder_of(other, "b", tmp_path, 0)
    longer = Study(tmp_path, {"a": "dapo"}, steps=61)
    assert folder_of(one, "a", tmp_path, 0) != folder_of(longer, "a", tmp_path, 0)


def test_another_task_has_runs_and_warm_starts_of_its_own(tmp_path):
    one = Study(tmp_path, {"a": "grpo"})
    other = Study(tmp_path, {"a": "grpo"}, task="sort")
    first, second = (arguments_of(study, "a", tmp_path, 0) for study in (one, other))
    assert second[second.index("--task") + 1] == "sort" != first[first.index("--task") + 1]
    for flag in ("--run-dir", "--weights"):
        assert first[first.index(flag) + 1] != second[second.index(flag) + 1]


def test_study_writes_tables_and_plots(tmp_path):
    curves = [curve(seed, (0.2, 0.4, 0.3, 0.5 + seed / 10)) for seed in range(3)]
    assert spread([0.1, 0.2, 0.6]) == "0.300 (0.100 to 0.600)"
    assert spread([math.nan, 1.0]) == "-"
    row = final_table(curves, {"actor/entropy": "entropy"}).splitlines()[-1]
    assert row == "| a | 0.200 | 0.450 (0.400 to 0.500) | 30.000 (30.000 to 30.000) | 0.7 |"
    draw_curves(curves, tmp_path / "curves.png", ["step", "seconds"], "title")
    draw_finals(curves, tmp_path / "finals.png", "title")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("curves", "finals"))
