"""How far an evaluation is: bars on a terminal, a few plain lines elsewhere."""

import time

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

LINES = 10
"""Lines per phase at most, where there is no terminal."""


class _CompilationColumn(ProgressColumn):
    """The program that is being compiled."""

    def render(self, task: Task) -> Text:
        line = None if task.finished else compilation.current_line()
        return Text(line or "", style="dim")


class EvaluationDisplay:
    """The phases of an evaluation, each with the completions done of all there will be.

    Args:
      console: where to show them; standard output by default.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console()
        self._progress: Progress | None = None
        self._phases: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
        self._printed = 0

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that so many of the completions of a phase are decoded and verified."""
        if phase not in self._begun:
            self._begun[phase], self._printed = time.monotonic(), 0
            if self._progress is not None:
                self._phases[phase] = self._progress.add_task(phase, total=total)
        if self._progress is not None:
            self._progress.update(self._phases[phase], completed=done)
        elif done > 0 and (done == total or done - self._printed >= total / LINES):
            self._printed = done
            seconds = time.monotonic() - self._begun[phase]
            # Not through the console: it would cut the line at 80 columns.
            print(
                f"{phase}: {done}/{total} completions, {seconds:.1f} s",
                file=self._console.file,
                flush=True,
            )

    def __enter__(self) -> "EvaluationDisplay":
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("completions"),
                TimeElapsedColumn(),
                _CompilationColumn(),
                console=self._console,
            )
            self._progress.start()
            compilation.drawing(self, True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            compilation.drawing(self, False)
            self._progress.stop()
            self._progress = None
