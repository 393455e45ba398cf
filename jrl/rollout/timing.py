"""Timing of the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the time of the body to `seconds[phase]`; the body must block on its own dispatches."""
    begin = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin
