"""Page of a run in progress: report.html, drawn again by a thread while the run continues."""

import threading
import time
from collections.abc import Callable

from jrl.report.warnings import FewWarnings

INTERVAL = 30.0
"""Least seconds between two drawings, except after an evaluation."""
MAX_SHARE = 0.05
"""Largest share of the time that is spent on drawing: a page that takes longer comes less often."""


class LivePage:
    """Draws the page of a run when it begins, after each evaluation, and after steps.

    A thread reads the files of the run and replaces the page, so that a step does not wait for it.

    Args:
      draw: writes the page, from files that grow meanwhile.
      warnings: of the run, for errors of drawing.
      interval: least seconds between two drawings, except after an evaluation.
    """

    def __init__(
        self, draw: Callable[[], object], warnings: FewWarnings, interval: float = INTERVAL
    ):
        self._draw, self._warnings, self._interval = draw, warnings, interval
        self._changed, self._hurry = threading.Event(), threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="jrl report", daemon=True)

    def step_ended(self, evaluated: bool) -> None:
        """Draws the page soon; at once if the step was evaluated."""
        self._changed.set()
        if evaluated:
            self._hurry.set()

    def __enter__(self) -> "LivePage":
        self._changed.set()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended = True
        self.step_ended(evaluated=True)
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        while True:
            self._changed.wait()
            self._hurry.wait(max(0.0, due - time.monotonic()))
            if self._has_ended:
                return
            self._changed.clear()
            self._hurry.clear()
            began = time.monotonic()
            draw_or_warn(self._draw, self._warnings)
            due = began + max(self._interval, (time.monotonic() - began) / MAX_SHARE)


def draw_or_warn(draw: Callable[[], object], warnings: FewWarnings) -> None:
    """Draws a page or plots of a run. An error is printed once and ends no run: the files that are
    drawn stay, and `jrl.report` draws them again."""
    try:
        draw()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        line = f"the report was not drawn ({reason}); python -m jrl.report RUN draws it again"
        warnings.warn("drawing", line)
