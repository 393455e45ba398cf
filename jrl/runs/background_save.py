"""Save in flight: the thread that completes a checkpoint while the run goes on."""

import contextlib
import threading
from collections.abc import Callable

from jrl.processes.agreement import is_multiprocess
from jrl.processes.background import BackgroundGather
from jrl.processes.progress import AGREEMENT, CHECKPOINT, phase


class BackgroundSave:
    """Thread that completes the checkpoint of one step; every process has one.

    Args:
      complete: writes what was copied; ends when the checkpoint is complete in all processes.
      gather: of the threads of all processes, which `complete` uses.
    """

    def __init__(self, complete: Callable[[], None], gather: BackgroundGather):
        self._gather = gather
        self._error: Exception | None = None
        # As an argument: a thread drops them at its end, and with them the copy of the state.
        self._thread = threading.Thread(target=self._run, args=(complete,), name="jrl checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint is complete, and raises its error.

        A process that waits for the others is in the phase of an agreement, so that the watchdog
        names the one whose files are late.
        """
        with phase(CHECKPOINT):
            self._gather.waits.wait()
            if not is_multiprocess():
                self._thread.join()
        if is_multiprocess():
            with phase(AGREEMENT):
                self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Ends the wait for the other processes, which may have ended."""
        self._gather.abandon()

    def _run(self, complete: Callable[[], None]) -> None:
        try:
            complete()
        except Exception as error:  # raised again by `wait`, whatever it is
            self._error = error
            with contextlib.suppress(RuntimeError):  # of a service that has ended
                self._gather.fail(str(error))
        finally:
            self._gather.waits.set()
