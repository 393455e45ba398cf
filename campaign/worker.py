"""A process that runs crossings: a line of JSON each in, a line each out.

Whoever starts it ends it where a crossing hangs, and starts another where XLA has aborted it.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from campaign.drawing import Crossing

ROOT = Path(__file__).parents[1]
SUPPORT = Path("tests", "support")
MOST_MEMORY = 3 << 30
"""Bytes after which a process makes way for another."""


class Worker:
    """The other end: a process that is there when a crossing is to be run.

    Args:
      seconds: that a crossing may take.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None

    def run(self, crossing: Crossing) -> dict[str, Any]:
        """The outcome, with the seconds of processor time that it took as `seconds`."""
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(crossing) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._ended("aborted")
        ready, _, _ = select.select([process.stdout], [], [], self.seconds)
        if not ready:
            return self._ended("hung")
        line = process.stdout.readline()
        if not line:
            return self._ended("aborted")
        found = json.loads(line)
        if found.pop("bytes") > MOST_MEMORY:
            self.close()
        return found

    def close(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        # Closes its pipes too; an answer that is on its way is nobody's.
        self._process.communicate()
        self._process = None
        self._errors.close()

    def start(self) -> subprocess.Popen[str]:
        """The process, started where there is none."""
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, as long as the process
            path = [str(ROOT), str(ROOT / SUPPORT), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "campaign.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                text=True,
            )
        return self._process

    def _ended(self, kind: str) -> dict[str, Any]:
        """The outcome of a crossing that took the process with it."""
        process = self._process
        assert process is not None
        process.kill()
        process.wait()
        self._errors.seek(0)
        # The last lines that are no frames of a stack.
        lines = [x for x in self._errors.read().splitlines() if x.strip() and x[0] not in "@ \t*"]
        self.close()
        reason = f"after {self.seconds:g} s" if kind == "hung" else f"exit {process.returncode}"
        return {"kind": kind, "reason": f"{reason}: {' | '.join(lines[-2:])[-300:]}"}


def answer(requests: TextIO, answers: TextIO) -> None:
    """Runs crossings until there are no more."""
    import psutil

    from campaign.comparing import outcome_of

    references: dict[str, Any] = {}
    for line in requests:
        begin = time.process_time()
        outcome = outcome_of(json.loads(line), references)
        said = {
            "kind": outcome.kind,
            "reason": outcome.reason,
            "distances": outcome.distances,
            "seconds": time.process_time() - begin,
            "bytes": psutil.Process().memory_info().rss,
        }
        print(json.dumps(said), file=answers, flush=True)


def main() -> None:
    from compiling import FLAGS, trace_quickly

    os.environ["XLA_FLAGS"] = " ".join([*FLAGS, *os.environ.get("XLA_FLAGS", "").split()])
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 16)
    # Promotions are as users have them: JAX's own attention in half precision needs them.
    trace_quickly()
    # What is printed elsewhere is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    with contextlib.redirect_stdout(sys.stderr):
        answer(sys.stdin, answers)


if __name__ == "__main__":
    main()
