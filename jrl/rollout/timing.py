"""Where the seconds of a step go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the time of its body, which waits for what it dispatches."""
    begin = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin
