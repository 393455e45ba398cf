"""Selected rows of a report: by name, and one process's share where several compile them."""

from collections.abc import Sequence
from typing import Any


class Claims:
    """Claims of one process to rows that several share.

    Attributes:
      last: number of the row that was claimed last, in the order in which all processes meet them.
      label: of that row.
    """

    def __init__(self, next_row: Any) -> None:
        """
        Args:
          next_row: `multiprocessing.Value`, the number of the first row without a claim.
        """
        self._next_row = next_row
        self._met = -1
        self.last = -1
        self.label = ""

    def claim(self, label: str) -> bool:
        """True if the next row is this process's, which is the first to meet it."""
        self._met += 1
        with self._next_row.get_lock():
            # No process is ahead of the first row without a claim: it would have claimed it.
            if self._next_row.value != self._met:
                return False
            self._next_row.value += 1
        self.last, self.label = self._met, label
        return True


class Selection:
    """Rows that a process compiles: those whose label contains one of the names, or all."""

    def __init__(self, names: Sequence[str] = (), claims: Claims | None = None) -> None:
        """
        Args:
          names: parts of labels; without any, all rows are selected.
          claims: of this process, where several share the rows.
        """
        self.names = tuple(names)
        self._claims = claims

    def takes(self, label: str) -> bool:
        """True if this process compiles the row. To be asked once for each row."""
        if self.names and not any(name in label for name in self.names):
            return False
        return self._claims is None or self._claims.claim(label)
