"""Display of an evaluation in progress."""

import io
import time

from rich.console import Console

from jrl.report.evaluation import MAX_LINES, EvaluationDisplay


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
