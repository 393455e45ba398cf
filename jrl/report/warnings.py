"""Warnings of repeated failures in a run."""

import sys

MAX_WARNINGS = 3
"""Different failures of which a run says a line each; all are counted in its metrics."""


class FewWarnings:
    """Says each failure once, and the first `MAX_WARNINGS` of them at all."""

    def __init__(self):
        self._printed: set[str] = set()

    def warn(self, failure: str, line: str) -> None:
        """Prints a line, unless one about this failure or enough about others have been said."""
        if failure in self._printed or len(self._printed) >= MAX_WARNINGS:
            return
        self._printed.add(failure)
        print(f"warning: {line}", file=sys.stderr, flush=True)
