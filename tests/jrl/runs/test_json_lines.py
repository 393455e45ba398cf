import io
import json
import sys
from datetime import UTC, datetime

from rich.console import Console

from jrl.report.display import TrainingDisplay
from jrl.runs.json_lines import JsonLines, restoring_streams, start_json_lines

MOMENT = datetime(2026, 11, 26, 18, 5, 7, 250_000, UTC)


def records(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_its_time_level_and_process():
    stream = io.StringIO()
    lines = JsonLines(stream, lambda: 3, lambda: MOMENT)
    lines.write("run folder: ")
    assert stream.getvalue() == ""
    lines.write('runs/"a"\n\n  \nerror: no\nwarning: é\nALARM: n02')
    lines.finish()
    result = records(stream)
    assert [(each["level"], each["message"]) for each in result] == [
        ("info", 'run folder: runs/"a"'),
        ("error", "error: no"),
        ("warning", "warning: é"),
        ("warning", "ALARM: n02"),
    ]
    assert {(each["time"], each["process"]) for each in result} == {
        ("2026-11-26T18:05:07.250+00:00", 3)
    }
    assert stream.getvalue().isascii()


def test_displays_and_consoles_print_lines():
    stream = io.StringIO()
    console = Console(file=JsonLines(stream, lambda: 0))
    with TrainingDisplay(4, console=console) as display:
        display.update(1, {"actor/loss": 0.5})
    console.print("[bold]plain[/bold]")
    assert [each["message"] for each in records(stream)] == [
        "completed step: 1/4, loss: 0.5000",
        "plain",
    ]


def test_streams_are_restored(monkeypatch):
    stream, before = io.StringIO(), sys.stderr
    monkeypatch.setattr(sys, "stdout", stream)
    with restoring_streams():
        for _ in range(2):
            start_json_lines("stdout", lambda: 0)
        print("one")
        print("two", end="")
    assert sys.stdout is stream and sys.stderr is before
    assert [each["message"] for each in records(stream)] == ["one", "two"]
