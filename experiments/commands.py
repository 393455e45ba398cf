"""A training command in a process of its own, as anyone would type it."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence


def complete(command: Sequence[str], quiet: bool = False) -> None:
    """Runs it, to its end.

    Args:
      command: the program and its arguments.
      quiet: whether what it prints is dropped, errors aside.

    Raises:
      SystemExit: 130 after Ctrl-C, which reaches the command too and is waited for while it saves;
        with a line of its own where the command fails.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL if quiet else None) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the second one ends the command at once
            process.wait()
            print("stopped; run the same command to resume", file=sys.stderr)
            raise SystemExit(130) from None
    if status:
        raise SystemExit(f"{shlex.join(command)} failed")
