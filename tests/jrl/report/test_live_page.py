"""The thread that draws report.html while a run continues."""

import threading

import pytest

from jrl.report.page import LivePage, draw_or_warn
from jrl.report.warnings import FewWarnings

LONG = 60.0
"""Seconds after which a test that waits has failed."""


class Drawings:
    """Counts drawings, and waits for them."""

    def __init__(self, error=None):
        self.count, self._drawn, self._error = 0, threading.Semaphore(0), error

    def __call__(self):
        self.count += 1
        self._drawn.release()
        if self._error is not None:
            raise self._error

    def wait(self):
        assert self._drawn.acquire(timeout=LONG)


def test_page_is_drawn_at_the_start_and_at_each_evaluation():
    drawings = Drawings()
    with LivePage(drawings, FewWarnings(), interval=10 * LONG) as page:
        drawings.wait()
        for _ in range(3):
            page.step_ended(evaluated=True)
            drawings.wait()
        page.step_ended(evaluated=False)
    # The step is drawn by the end of the run, which need not wait for the interval.
    assert drawings.count == 4


def test_steps_without_evaluation_are_drawn_after_the_interval():
    drawings = Drawings()
    with LivePage(drawings, FewWarnings(), interval=0.0) as page:
        drawings.wait()
        page.step_ended(evaluated=False)
        drawings.wait()


@pytest.mark.parametrize("error", [ValueError("a\nb"), OSError(28, "no space"), KeyError("x")])
def test_an_error_of_drawing_is_said_once(error, capsys):
    drawings, warnings = Drawings(error), FewWarnings()
    with LivePage(drawings, warnings, interval=0.0) as page:
        drawings.wait()
        page.step_ended(evaluated=True)
        drawings.wait()
    draw_or_warn(drawings, warnings)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"not drawn ({type(error).__name__}: " in said
