"""Warnings of repeated failures in a run."""

import sys

MOST = 3
"""Different failures of which a run says a line each; all are counted in its metrics."""


class FewWarnings:
    """Says each failure once, and the first `MOST` of them at all."""

    def __init__(self):
        self._said: set[str] = set()

    def say(self, failure: str, line: str) -> None:
        """Prints a line, unless one about this failure or enough about others have been said."""
        if failure in self._said or len(self._said) >= MOST:
            return
        self._said.add(failure)
        print(f"warning: {line}", file=sys.stderr, flush=True)
