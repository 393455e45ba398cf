"""Progress of an evaluation: bars on a terminal, a few plain lines elsewhere."""

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from jrl.report import compilation

MAX_LINES = 10
"""Lines per phase at most for completions that are done, where there is no terminal."""
FIRST_WAIT, MAX_WAIT, WAIT_GROWTH = 10.0, 300.0, 1.5
"""Seconds without a line after which there is one all the same, the first time and at most, and by
how much it is more each time: the first completions may take long."""


class _CompilationColumn(ProgressColumn):
    """The program that is being compiled."""

    def render(self, task: Task) -> Text:
        line = None if task.finished else compilation.current_line()
        return Text(line or "", style="dim")


class _TokensColumn(ProgressColumn):
    """The tokens that a phase has sampled.

    Args:
      phases: by their names.
    """

    def __init__(self, phases: "dict[str, _Phase]"):
        super().__init__()
        self._phases = phases

    def render(self, task: Task) -> Text:
        return Text(self._phases[task.description].tokens_line)


class _Phase:
    """Progress of a phase: completions, tokens and seconds.

    Args:
      tokens: sampled so far, in all phases.
    """

    def __init__(self, tokens: Callable[[], int]):
        self._tokens, self._before, self._begun = tokens, tokens(), time.monotonic()
        self._end: tuple[int, float] | None = None
        self.done, self.total, self.printed = 0, 0, 0

    def update(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        # Later phases count on.
        self._end = (self.tokens, self.seconds) if done == total else None

    @property
    def tokens(self) -> int:
        return self._tokens() - self._before if self._end is None else self._end[0]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun if self._end is None else self._end[1]

    @property
    def tokens_line(self) -> str:
        tokens = self.tokens
        return f"{tokens:,} tokens" if tokens else ""

    def line(self, name: str) -> str:
        fields = f"{self.done}/{self.total} completions", self.tokens_line, f"{self.seconds:.1f} s"
        return f"{name}: {', '.join(field for field in fields if field)}"


class EvaluationDisplay:
    """The phases of an evaluation, each with the completions done of all there will be.

    Where there is no terminal, a line comes for every tenth of a phase and, while none is finished,
    after ten seconds and then ever more seldom.

    Args:
      console: where to show them; standard output by default.
      tokens: how many were sampled so far; None shows no tokens. It is asked in other threads.
      wait: seconds without a line after which there is one.
    """

    def __init__(
        self,
        console: Console | None = None,
        tokens: Callable[[], int] | None = None,
        wait: float = FIRST_WAIT,
    ):
        self._console = console or Console()
        self._tokens = (lambda: 0) if tokens is None else tokens
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._phases: dict[str, _Phase] = {}
        self._wait, self._last_printed = wait, 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that so many of the completions of a phase are decoded and verified."""
        with self._lock:
            is_new = phase not in self._phases
            if is_new:
                self._phases[phase] = _Phase(self._tokens)
                if self._progress is not None:
                    self._bars[phase] = self._progress.add_task(phase, total=total)
            current = self._phases[phase]
            current.update(done, total)
            if self._progress is not None:
                self._progress.update(self._bars[phase], completed=done)
            elif is_new or done == total or done - current.printed >= total / MAX_LINES:
                current.printed = done
                self._print(phase)

    def _print(self, phase: str) -> None:
        # Not through the console: it would cut the line at 80 columns.
        print(self._phases[phase].line(phase), file=self._console.file, flush=True)
        self._last_printed = time.monotonic()

    def _remind(self) -> None:
        """Prints the line of the current phase now and then, until the end."""
        wait = self._wait
        while not self._ended.wait(wait):
            with self._lock:
                phase = next(reversed(self._phases), None)
                if phase is None or self._phases[phase].done == self._phases[phase].total:
                    continue
                if time.monotonic() - self._last_printed >= wait:
                    self._print(phase)
                    wait = min(WAIT_GROWTH * wait, MAX_WAIT)

    def __enter__(self) -> "EvaluationDisplay":
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("completions"),
                _TokensColumn(self._phases),
                TimeElapsedColumn(),
                _CompilationColumn(),
                console=self._console,
            )
            self._progress.start()
            compilation.set_drawing(self, True)
        else:
            self._thread = threading.Thread(
                target=self._remind, name="jrl evaluation display", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._progress is not None:
            compilation.set_drawing(self, False)
            self._progress.stop()
            self._progress = None
