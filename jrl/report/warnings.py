"""Warnings of repeated failures in a run."""

import sys

MAX_WARNINGS = 3
"""Maximum number of distinct failures with a printed line; all are counted in metrics."""


class FewWarnings:
    """Prints each failure once, and at most `MAX_WARNINGS` distinct failures."""

    def __init__(self):
        self._printed: set[str] = set()

    def warn(self, failure: str, line: str) -> None:
        """Prints a line, unless this failure was printed before or the maximum is reached."""
        if failure in self._printed or len(self._printed) >= MAX_WARNINGS:
            return
        self._printed.add(failure)
        print(f"warning: {line}", file=sys.stderr, flush=True)
