"""What an evaluation shows while it goes on."""

import io

from rich.console import Console

from jrl.report.evaluation_display import LINES, EvaluationDisplay


def test_a_bar_per_phase_on_a_terminal():
    file = io.StringIO()
    with EvaluationDisplay(Console(file=file, force_terminal=True, width=100)) as display:
        for phase, total in (("sampled", 20), ("greedy", 5)):
            for done in (0, total):
                display.update(phase, done, total)
    lines = file.getvalue().splitlines()
    for phase, count in (("sampled", "20/20"), ("greedy", "5/5")):
        assert any(phase in line and count in line for line in lines)


def test_a_few_lines_elsewhere():
    file = io.StringIO()
    with EvaluationDisplay(Console(file=file)) as display:
        for done in range(1001):
            display.update("sampled", done, 1000)
        display.update("greedy", 0, 4)
        display.update("greedy", 4, 4)
    lines = file.getvalue().splitlines()
    assert len(lines) == LINES + 1
    assert lines[-2].startswith("sampled: 1000/1000 completions, ")
    assert lines[-1].startswith("greedy: 4/4 completions, ")
