import io
import math
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from jrl.report import display

METRICS = {
    "perf/time_per_step": 0.4123,
    "perf/tokens_per_second": 5321.4,
    "actor/loss": -0.01234,
    "critic/score/mean": 0.75,
    "response_length/mean": 12.34,
    "actor/entropy": 0.3,
    "actor/ppo_kl": 0.0021,
    "actor/pg_clipfrac": 0.0123,
    "unknown": 1,
}


def pipe():
    return Console(file=io.StringIO(), width=80)


def terminal(width=100):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def samples(*rows):
    """Of prompt, completion, score and, if that does not say it, the reason."""
    names = "prompt", "completion", "score"
    reasons = {1.0: "correct", 0.0: "wrong"}
    return [
        {**dict(zip(names, row[:3], strict=True)), "reason": [*row, reasons.get(row[2])][3]}
        for row in rows
    ]


def written(console):
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_sparkline_spans_its_range():
    assert display.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert display.sparkline([3.0, 3.0]) == "▁▁"
    assert display.sparkline([]) == ""
    assert display.sparkline([math.nan]) == ""
    assert display.sparkline([0.0, math.nan, math.inf, 1.0]) == "▁  █"


@pytest.mark.parametrize("count", [30, 31, 59, 60, 1000])
def test_long_sparklines_are_averaged_to_their_width(count):
    curve = display.sparkline(range(count), width=30)
    assert len(curve) == 30 and list(curve) == sorted(curve)
    assert curve[0] == "▁" and curve[-1] == "█"


def test_a_gap_of_nothing_finite_stays_a_gap_when_averaged():
    curve = display.sparkline([0.0, 0.0, math.nan, math.nan, 1.0, 1.0], width=3)
    assert curve == "▁ █"


def test_samples_escape_control_characters():
    text = "a\n\x1b[2J\x07\x7f\t\x9b\u202e\u2028\ud800é😀"
    assert display.visible(text) == "a↵\n␛[2J␇␡␉\\x9b\\u202e\\u2028\\ud800é😀"


def test_step_line_has_the_order_of_maxtext():
    line = display.training_line(12, 150, METRICS | {"val/accuracy/greedy": 0.5})
    assert line == (
        "completed step: 12/150, seconds: 0.412, tokens/s: 5321, loss: -0.0123, reward: 0.750, "
        "accuracy greedy: 0.500, length: 12.3, entropy: 0.300, kl: 2.10e-03, clip fraction: 0.0123"
    )


def test_a_pipe_gets_one_plain_line_every_few_steps():
    console = pipe()
    with display.TrainingDisplay(23, console=console, every=10) as shown:
        for step in range(1, 24):
            shown.update(step, METRICS | ({"val/accuracy/sampled": 0.5} if step == 14 else {}))
    lines = written(console).splitlines()
    steps = [int(line.split()[2].split("/")[0]) for line in lines]
    # The first, an evaluation, ten after each, and the last.
    assert steps == [1, 11, 14, 23]
    assert "\x1b" not in written(console)


@pytest.mark.parametrize("console", [pipe(), terminal()], ids=["pipe", "terminal"])
def test_a_step_of_ten_seconds_is_a_line_of_its_own(console, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with display.TrainingDisplay(100, console=console, every=50) as shown:
        for step, seconds in enumerate([12.0, 3.0, 9.0, 11.0, 3.0, 10.0], start=1):
            now[0] += seconds
            shown.update(step, {"actor/loss": 0.25})
        found = re.findall(r"completed step: (\d+)/100, loss: 0.2500\s", written(console))
    assert found == ["1", "4", "6"]


def test_step_line_shows_slot_utilisation():
    line = display.training_line(1, 2, METRICS | {"perf/slot_utilisation": 0.8765})
    assert line.endswith(", clip fraction: 0.0123, slots used: 0.88")


def test_a_run_that_stops_early_prints_its_last_step_once():
    console = pipe()
    with display.TrainingDisplay(100, first_step=40, console=console, every=10) as shown:
        for step in (41, 42, 43):
            shown.update(step, METRICS)
    assert [line.split(",")[0] for line in written(console).splitlines()] == [
        "completed step: 41/100",
        "completed step: 43/100",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_a_live_display(width):
    console = terminal(width)
    with display.TrainingDisplay(10, rewards=[0.1, 0.2], console=console) as shown:
        shown.update(1, METRICS | {"val/accuracy/sampled": 0.625, "val/accuracy/greedy": 1})
        shown.update(2, METRICS)
    last = written(console)
    for text in (
        "2/10",
        "5,321 tokens/s",
        "reward 0.750 ▁▂██",
        "sampled 0.625, greedy 1.000 at step 1",
        "length 12.3 tokens",
        "entropy 0.300 nats",
        "KL 2.10e-03 nats",
        "clipped 1.2%",
    ):
        assert text in last
    # The header fits on a line: its end is not wrapped away.
    assert any("training" in line and "tokens/s" in line for line in last.splitlines())


@pytest.mark.parametrize(
    ("kl", "cell"),
    [(2.1e-3, "2.10e-03"), (1e-5, "1.00e-05"), (-3e-7, "<1e-05"), (0, "<1e-05"), (math.nan, "nan")],
)
def test_display_writes_differences_of_rounding_by_their_bound(kl, cell):
    console = terminal()
    with display.TrainingDisplay(10, console=console) as shown:
        shown.update(1, METRICS | {"actor/ppo_kl": kl, "actor/entropy": 3e-7})
    assert f"KL {cell} nats" in written(console) and "entropy 0.000 nats" in written(console)


def test_display_shows_the_warm_start():
    piped, live = pipe(), terminal()
    for console in (piped, live):
        with display.WarmStartDisplay(200, target=0.5, console=console, every=100) as shown:
            shown.update(1, 2.5)
            shown.update(50, 1.25, accuracy=0.25)
            shown.update(60, 1.125)
    assert written(piped).splitlines() == [
        "warm start: 1/200, loss: 2.5000",
        "warm start: 50/200, loss: 1.2500, accuracy: 0.250 of 0.500",
        "warm start: 60/200, loss: 1.1250, accuracy: 0.250 of 0.500",
    ]
    assert "60/200" in written(live) and "accuracy 0.250 of 0.500" in written(live)


def test_a_failure_inside_restores_the_terminal():
    console = terminal()
    with pytest.raises(RuntimeError), display.TrainingDisplay(10, console=console):
        raise RuntimeError
    assert written(console).endswith("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize("console", [pipe(), terminal(80)], ids=["pipe", "terminal"])
def test_samples_side_by_side_and_harmless(console):
    display.print_samples(
        samples(("sort 312", "132", 0.0), ("[bold]x[/bold]", "\x1b[2J:smile:[/]", 0.5)),
        samples(("sort 312", "123", 1.0), ("[bold]x[/bold]", "\x07", 0)),
        console=console,
    )
    text = written(console)
    assert "\x1b[2J" not in text and "\x07" not in text
    assert "[bold]x[/bold]" in text and "␛[2J:smile:[/]" in text and "␇" in text
    (row,) = [line for line in text.splitlines() if "sort 312" in line]
    assert row.index("132") < row.index("✗ 0.00") < row.index("123") < row.index("✓ 1.00")
    assert "◐ 0.50" in text


@pytest.mark.parametrize(
    ("score", "reason", "mark"),
    [(1.0, "partial", "◐ 1.00"), (2.0, "correct", "✓ 2.00"), (-1.0, "wrong", "✗ -1.00")],
)
def test_samples_mark_correct_answers(score, reason, mark):
    """Full marks of a user's reward may be 2, and 1 then counts for nothing."""
    console = pipe()
    rows = samples(("a", "b", score, reason))
    display.print_samples(rows, rows, console=console)
    assert mark in written(console)


def test_samples_on_a_terminal_without_unicode():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    before, after = samples(("é", "b\n", 0.0)), samples(("é", "c", 1.0))
    display.print_samples(before, after, console=Console(file=file, width=80))
    file.seek(0)
    assert "\\xe9" in file.read()


def test_print_samples_pairs_equal_prompts():
    """As in a run whose data file changed in between."""
    console = pipe()
    before = samples(("sort 12", "12", 0.0), ("sort 21", "x", 0.0), ("sort 33", "y", 0.0))
    display.print_samples(before, samples(("sort 33", "z", 1.0), ("sort 9", "9", 1.0)), console)
    text = written(console)
    (row,) = [line for line in text.splitlines() if "sort" in line]
    assert row.index("sort 33") < row.index("y") < row.index("z")
    assert "2 other prompts were sampled only before, or only after" in text
