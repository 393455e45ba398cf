"""Schedule of a run's checkpoints: every so many steps, and after so many minutes."""

import time
from collections.abc import Callable

from jrl.processes.agreement import any_of, is_main_process


class CheckpointSchedule:
    """Decides after each step whether a checkpoint is due, the same in all processes.

    Args:
      every: steps between two checkpoints.
      minutes: minutes since the last one after which a step ends with a checkpoint; None is any.
      clock: seconds; of the first process, which decides.
    """

    def __init__(
        self, every: int, minutes: float | None, clock: Callable[[], float] = time.monotonic
    ):
        self._every, self._minutes, self._clock = every, minutes, clock
        self._saved_at = clock()

    def is_due(self, step: int) -> bool:
        """True if `step` ends with a checkpoint; a collective."""
        if step % self._every == 0:
            return True
        if self._minutes is None:
            return False
        seconds = self._clock() - self._saved_at
        return any_of(is_main_process() and seconds >= 60.0 * self._minutes)

    def saved(self) -> None:
        """Starts the minutes again."""
        self._saved_at = self._clock()
