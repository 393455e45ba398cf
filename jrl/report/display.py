"""Terminal displays of a run: progress of both stages, and a table of completions.

On a terminal the displays are live; elsewhere (CI, a pipe, ``!python`` in a notebook) they are one
plain line every few steps. Text from a model is never interpreted: no rich markup, no terminal
escapes.
"""

import math
import re
import time
import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jrl.report import compilation
from jrl.report.metrics import ROUNDING, is_rounding

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"

LONG_STEP = 10.0
"""Seconds since the last step from which each step is printed as a line."""

# Label, metric and format of the cells below the bar, in reading order; absent ones are left out.
CELLS = (
    ("length", "response_length/mean", "{:.1f} tokens"),
    ("entropy", "actor/entropy", "{:.3f} nats"),
    ("KL", "actor/ppo_kl", "{:.2e} nats"),
    ("clipped", "actor/pg_clipfrac", "{:.1%}"),
)
EVALUATION = (
    ("sampled", "val/accuracy/sampled"),
    ("greedy", "val/accuracy/greedy"),
    ("nats", "val/nll"),
    ("tokens right", "val/token_accuracy"),
)

# The order of MaxText's step line, for which parsers exist.
LINE = (
    ("seconds", "perf/time_per_step", "{:.3f}"),
    ("tokens/s", "perf/tokens_per_second", "{:.0f}"),
    ("loss", "actor/loss", "{:.4f}"),
    ("reward", "critic/score/mean", "{:.3f}"),
    ("accuracy sampled", "val/accuracy/sampled", "{:.3f}"),
    ("accuracy greedy", "val/accuracy/greedy", "{:.3f}"),
    ("held-out loss", "val/nll", "{:.4f}"),
    ("tokens right", "val/token_accuracy", "{:.3f}"),
    ("length", "response_length/mean", "{:.1f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("kl", "actor/ppo_kl", "{:.2e}"),
    ("clip fraction", "actor/pg_clipfrac", "{:.4f}"),
    ("slots used", "perf/slot_utilisation", "{:.2f}"),
)


def sparkline(values: Sequence[float | int], width: int = 40, blocks: str = BLOCKS) -> str:
    """Return a curve as a string of at most `width` characters.

    More values than `width` are averaged in equal bins. The lowest value is the lowest block, the
    highest value the highest; a NaN or an infinity is a gap.
    """
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        bins = [list(filter(math.isfinite, values[start:end])) for start, end in pairwise(edges)]
        values = [sum(finite) / len(finite) if finite else math.nan for finite in bins]
    present = list(filter(math.isfinite, values))
    if not present:
        return ""
    low, high = min(present), max(present)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(
        blocks[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )


def visible(text: str) -> str:
    """Return `text` with every character that controls a terminal made visible.

    A newline becomes ``↵`` and a new line; other control characters become their symbol (``␛``);
    characters that reorder or hide text become their escape (``\\u202e``).
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _clock(seconds: float | int) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


Display = TypeVar("Display", bound="_ProgressDisplay")


class _ProgressDisplay:
    """A bar with time and a body below it on a terminal; plain lines elsewhere."""

    def __init__(
        self, title: str, num_steps: int, first_step: int, console: Console | None, every: int
    ):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 step")
        self._title = title
        self._num_steps = num_steps
        self._console = console or Console()
        self._every = every
        self._step = first_step
        self._side: str = ""
        self._body: RenderableType = Text("starting ...", style="dim")
        self._started = time.monotonic()
        # The remaining time is estimated from the last steps: the first one compiles.
        self._ticks: deque[tuple[int, float]] = deque(maxlen=20)
        self._printed = first_step
        self._last_line: tuple[int, str] | None = None
        self._live: Live | None = None
        self._stopped = False

    def __enter__(self: Display) -> Display:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=4
            )
            self._live.start()
            compilation.set_drawing(self, True)
        return self

    def _show(
        self, step: int, side: str, body: RenderableType, line: str, always: bool = False
    ) -> None:
        """Show `body` on a terminal. Print `line` after a long step, and if there is no terminal
        also if it is due or `always`."""
        first, now = not self._ticks, time.monotonic()
        is_long = now - (self._started if first else self._ticks[-1][1]) >= LONG_STEP
        self._step, self._side, self._body = step, side, body
        self._ticks.append((step, now))
        if self._live is not None:
            if is_long:
                self._live.console.print(Text(line), soft_wrap=True)  # above the display
            return
        self._last_line = (step, line)
        is_due = step >= self._num_steps or step >= self._printed + self._every
        if first or always or is_long or is_due:
            self._print_line()

    def _note(self, line: str) -> None:
        """Print a line immediately, unless the console is a terminal."""
        if self._live is None:
            # Not through the console, which would cut the line at 80 columns.
            print(line, file=self._console.file, flush=True)

    def __exit__(self, *error: object) -> None:
        self._stopped = True
        if self._live is not None:
            compilation.set_drawing(self, False)
            self._live.stop()  # draws once more
            self._live = None
        else:
            self._print_line()

    def _print_line(self) -> None:
        """Print the last line unless it has been printed."""
        if self._last_line is None:
            return
        self._printed, line = self._last_line
        self._last_line = None
        self._note(line)

    def _remaining(self) -> str:
        if len(self._ticks) < 2:
            return "?"
        (first, first_time), (last, last_time) = self._ticks[0], self._ticks[-1]
        if last <= first:
            return "?"
        return _clock((self._num_steps - last) * (last_time - first_time) / (last - first))

    def _render(self) -> RenderableType:
        elapsed = _clock(time.monotonic() - self._started)
        bar = min(30, max(6, self._console.width - 64))  # the rest of the row is some 64 wide
        header = Table.grid(padding=(0, 2))
        header.add_row(
            Text(self._title, style="bold cyan"),
            ProgressBar(total=max(self._num_steps, 1), completed=self._step, width=bar),
            Text(f"{self._step}/{self._num_steps}", style="bold"),
            Text(f"{elapsed} elapsed"),
            Text("" if self._stopped else f"{self._remaining()} left", style="dim"),
            Text(self._side, style="magenta"),
        )
        compiling = compilation.current_line()
        lines = [] if compiling is None else [Text(compiling, style="dim")]
        return Group(header, self._body, *lines)


class WarmStartDisplay(_ProgressDisplay):
    """The progress of the supervised phase, towards its target.

    Args:
      num_steps: maximum number of steps.
      target: the accuracy that ends it, in (0, 1].
      console: target of the display; standard output by default.
      every: steps between two plain lines if the console is no terminal.
    """

    def __init__(
        self, num_steps: int, target: float | int, console: Console | None = None, every: int = 100
    ):
        super().__init__("warm start", num_steps, 0, console, every)
        self.target = target
        self._accuracy: float | int | None = None

    def update(self, step: int, loss: float | int, accuracy: float | int | None = None) -> None:
        """Show the state after `step` steps; the last accuracy is kept if `accuracy` is None."""
        measured = accuracy is not None
        self._accuracy = accuracy if measured else self._accuracy
        reached = "not measured yet" if self._accuracy is None else f"{self._accuracy:.3f}"
        cells = _cell("loss", f"{loss:.4f}"), _cell("accuracy", f"{reached} of {self.target:.3f}")
        line = f"warm start: {step}/{self._num_steps}, loss: {loss:.4f}"
        if self._accuracy is not None:
            line += f", accuracy: {self._accuracy:.3f} of {self.target:.3f}"
        self._show(step, "", Text("   ").join(cells), line, always=measured)


class TrainingDisplay(_ProgressDisplay):
    """The progress of reinforcement learning: time, speed, reward with its curve, and key metrics.

    Args:
      num_steps: the step at which the run ends.
      first_step: the step it starts from, above 0 in a resumed run.
      rewards: mean scores of the earlier steps of a resumed run, for its curve.
      console: target of the display; standard output by default.
      every: steps between two plain lines if the console is no terminal.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int = 0,
        rewards: Sequence[float | int] = (),
        console: Console | None = None,
        every: int = 10,
    ):
        super().__init__("training", num_steps, first_step, console, every)
        self._rewards = list(rewards)
        self._evaluation: tuple[int, dict[str, float | int]] | None = None
        self._alarm = ""

    def alarm(self, line: str) -> None:
        """Show a warning; the last one is kept."""
        self._alarm = visible(line)
        self._note(f"ALARM: {self._alarm}")

    def update(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Show the state after `step` steps; the last evaluation is kept until the next."""
        if "critic/score/mean" in metrics:
            self._rewards.append(float(metrics["critic/score/mean"]))
        evaluation = {label: metrics[name] for label, name in EVALUATION if name in metrics}
        if evaluation:
            self._evaluation = (step, evaluation)
        speed = ""
        if "perf/tokens_per_second" in metrics:
            speed = f"{metrics['perf/tokens_per_second']:,.0f} tokens/s"
        cells = [
            _cell(label, _written(name, form, metrics[name]))
            for label, name, form in CELLS
            if name in metrics
        ]
        body = Group(self._reward_and_accuracy(), Text("   ").join(cells))
        if self._alarm:
            body = Group(body, Text(f"ALARM: {self._alarm}", style="bold red"))
        line = training_line(step, self._num_steps, metrics)
        self._show(step, speed, body, line, always=bool(evaluation))

    def _reward_and_accuracy(self) -> Text:
        cells = []
        if self._rewards:
            blocks = ASCII_BLOCKS if self._console.options.ascii_only else BLOCKS
            width = min(30, max(6, self._console.width - 68))  # the rest is some 68 wide
            curve = Text(f" {sparkline(self._rewards, width, blocks)}", style="green")
            cells.append(_cell("reward", f"{self._rewards[-1]:.3f}") + curve)
        if self._evaluation is not None:
            step, values = self._evaluation
            shown = ", ".join(f"{label} {value:.3f}" for label, value in values.items())
            word = "held-out" if "nats" in values else "accuracy"
            cells.append(_cell(word, shown) + Text(f" at step {step}", style="dim"))
        return Text("   ").join(cells)


def training_line(step: int, num_steps: int, metrics: Mapping[str, float | int]) -> str:
    """Return one step as a line: step, seconds, tokens/s, loss and other available metrics."""
    fields = [
        f"{label}: {form.format(metrics[name])}" for label, name, form in LINE if name in metrics
    ]
    return ", ".join([f"completed step: {step}/{num_steps}", *fields])


def print_samples(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    console: Console | None = None,
) -> None:
    """Print completions before RL and of the same prompts after it, side by side.

    Both are samples from `jrl.runs.records.read_samples`. A prompt of only one of them, as in a run
    whose data file changed, is left out and counted.
    """
    console = console or Console()
    table = Table(box=box.ROUNDED, title="Completions of held-out prompts", show_lines=True)
    for heading in ("prompt", "before", "", "after", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "")
    remaining = list(after)
    for sample_before in before:
        same = [each for each in remaining if each["prompt"] == sample_before["prompt"]]
        if not same:
            continue
        remaining.remove(sample_after := same[0])
        cells = [printable(sample_before["prompt"], console)]
        for sample in (sample_before, sample_after):
            cells += [printable(sample["completion"], console), score_mark(sample, console)]
        table.add_row(*cells)
    console.print(table)
    if unpaired := max(len(before), len(after)) - len(table.rows):
        console.print(f"{unpaired} other prompts were sampled only before, or only after")


def printable(text: str, console: Console) -> Text:
    """A text in the characters that a console can print, after `visible`."""
    encoding = console.encoding
    return Text(visible(text).encode(encoding, errors="backslashreplace").decode(encoding))


def score_mark(sample: Mapping[str, Any], console: Console) -> Text:
    """The score of a sample, with ``✓`` if it counts for accuracy and ``✗`` if it is 0."""
    score = float(sample["score"])
    # As for accuracy: full marks of a custom reward may be any number.
    if sample.get("reason") == "correct":
        mark, style = "✓", "bold green"
    elif score > 0.0:
        mark, style = "◐", "yellow"
    else:
        mark, style = "✗", "red"
    shown = f"{score:.2f}" if console.options.ascii_only else f"{mark} {score:.2f}"
    return Text(shown, style=style)


def _written(name: str, form: str, value: float | int) -> str:
    """A metric as a cell; a difference of rounding by its bound."""
    if is_rounding(name, [value]) and math.isfinite(value):
        return "<" + re.sub(r"{.*}", f"{ROUNDING:g}", form)
    return form.format(value)


def _cell(label: str, value: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, "bold"))
