"""Display of an evaluation in progress."""

import io
import math
import time

import pytest
from rich.console import Console

from jrl.report.evaluation import MAX_LINES, EvaluationDisplay, first_evaluation, summarize_run
from jrl.report.metrics import always_zero
from jrl.runs.folder import RunFolder
from jrl.runs.records import Appender


def test_a_bar_per_phase_on_a_terminal():
    file = io.StringIO()
    with EvaluationDisplay(Console(file=file, force_terminal=True, width=100)) as display:
        for phase, total in (("sampled", 20), ("greedy", 5)):
            for done in (0, total):
                display.update(phase, done, total)
    lines = file.getvalue().splitlines()
    for phase, count in (("sampled", "20/20"), ("greedy", "5/5")):
        assert any(phase in line and count in line for line in lines)


def test_evaluation_prints_lines_without_a_terminal():
    file = io.StringIO()
    with EvaluationDisplay(Console(file=file)) as display:
        for done in range(1001):
            display.update("sampled", done, 1000)
        display.update("greedy", 0, 4)
        display.update("greedy", 4, 4)
    lines = file.getvalue().splitlines()
    assert len(lines) == MAX_LINES + 1 + 2
    assert lines[0].startswith("sampled: 0/1000 completions, ")
    assert lines[-3].startswith("sampled: 1000/1000 completions, ")
    assert lines[-2].startswith("greedy: 0/4 completions, ")
    assert lines[-1].startswith("greedy: 4/4 completions, ")


def test_tokens_are_counted_for_each_phase():
    file, sampled = io.StringIO(), [7]
    with EvaluationDisplay(Console(file=file), tokens=lambda: sampled[0]) as display:
        display.update("sampled", 0, 2)
        sampled[0] = 1207
        display.update("sampled", 2, 2)
        display.update("greedy", 0, 1)
        sampled[0] = 1217
        display.update("greedy", 1, 1)
    lines = [line.rpartition(", ")[0] for line in file.getvalue().splitlines()]
    assert lines == [
        "sampled: 0/2 completions",
        "sampled: 2/2 completions, 1,200 tokens",
        "greedy: 0/1 completions",
        "greedy: 1/1 completions, 10 tokens",
    ]


def test_evaluation_prints_progress_without_finished_completions():
    file = io.StringIO()
    with EvaluationDisplay(Console(file=file), tokens=lambda: 64, wait=0.01) as display:
        display.update("sampled", 0, 2)
        end = time.monotonic() + 30
        while len(file.getvalue().splitlines()) < 3:
            assert time.monotonic() < end, file.getvalue()
            time.sleep(0.01)
    lines = file.getvalue().splitlines()
    assert all(line.startswith("sampled: 0/2 completions, ") for line in lines)
    assert len(lines) < 100  # ever more seldom


def evaluated(*, accuracy, score):
    metrics = {"timing_s/testing": 2.5}
    for mode, shift in (("sampled", 0.0), ("greedy", 0.125)):
        metrics |= {f"val/accuracy/{mode}": accuracy + shift, f"val/score/{mode}": score + shift}
    return metrics


@pytest.mark.parametrize(
    ("first", "last", "line"),
    [
        # Full marks or none: the score is the accuracy.
        ((0.25, 0.25), (0.5, 0.5), "sampled 0.250 -> 0.500, greedy 0.375 -> 0.625"),
        (
            (0.0, 0.0625),
            (0.0, 0.4375),
            "sampled 0.000 -> 0.000, greedy 0.125 -> 0.125; "
            "score: sampled 0.062 -> 0.438, greedy 0.188 -> 0.562",
        ),
    ],
)
def test_closing_line_has_the_score_beside_the_accuracy(first, last, line, tmp_path):
    folder = RunFolder(tmp_path)
    with Appender(folder.metrics_path) as lines:
        for step, (accuracy, score) in enumerate([first, last]):
            lines.append(step, evaluated(accuracy=accuracy, score=score))
    assert summarize_run(folder).splitlines()[0] == f"held-out accuracy, start -> step 1: {line}"


def test_evaluation_of_a_stopped_run_is_its_last_one(tmp_path):
    folder = RunFolder(tmp_path)
    with Appender(folder.metrics_path) as lines:
        lines.append(0, evaluated(accuracy=0.25, score=0.25))
        lines.append(1, {"critic/score/mean": 0.5})
    folder.write_stopped(1, evaluated(accuracy=0.75, score=0.75))
    assert "start -> step 1: sampled 0.250 -> 0.750" in summarize_run(folder)
    with Appender(folder.metrics_path) as lines:
        lines.append(2, {"critic/score/mean": 0.5})  # resumed by a version that left the file
    assert "start -> step 0" in summarize_run(folder)


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ([{}], []),
        ([{"reward/a": 0.0, "reward/b": 0.0}, {"reward/b": 0.5}], ["a"]),
        ([{"reward/a": 0.0, "val/reward/a": 0.25}], []),
        ([{"reward/a": 0.0, "val/reward/a": 0.0, "reward/suspicion": 0.0}], ["a"]),
        ([{"reward/a": math.nan}], []),
    ],
)
def test_always_zero_names_parts_of_a_reward(lines, names):
    assert always_zero(lines) == names


def test_first_evaluation_is_a_line():
    line = first_evaluation(evaluated(accuracy=0.25, score=0.5))
    assert line == (
        "before the first step: held-out accuracy sampled 0.250, greedy 0.375; score sampled "
        "0.500, greedy 0.625 (2.5 s)"
    )
    line = first_evaluation({"val/nll": 1.25, "timing_s/testing": 1.0})
    assert (
        line == "before the first step: loss 1.250 nats a token on held-out conversations (1.0 s)"
    )
