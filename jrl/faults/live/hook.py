"""Hooks called for an alarm: a shell command, or a function of the library's caller."""

import os
import subprocess
import sys
from collections.abc import Callable

from jrl.faults.collect.fleet import Alarm

TIMEOUT = 300.0
"""Seconds after which a command that does not end is killed."""

Hook = Callable[[Alarm], object]


def command_hook(command: str, timeout: float | int = TIMEOUT) -> Hook:
    """Returns a function that runs a shell command and reports a failure on standard error.

    The command receives the alarm in its environment: ``JRL_FAULT_MACHINE``, ``JRL_FAULT_METRIC``,
    ``JRL_FAULT_START`` and ``JRL_FAULT_END`` (Unix times in seconds), and ``JRL_FAULT_LINE``, all
    of it in words. Put the names in double quotes there.

    Raises:
      ValueError: on an empty command.
    """
    if not command.strip():
        raise ValueError("on_fault is an empty command: leave it out, or give the command to run.")

    def run(alarm: Alarm) -> int:
        environment = {
            **os.environ,
            "JRL_FAULT_MACHINE": alarm.machine,
            "JRL_FAULT_METRIC": alarm.metric,
            "JRL_FAULT_START": f"{alarm.start:.3f}",
            "JRL_FAULT_END": f"{alarm.end:.3f}",
            "JRL_FAULT_LINE": alarm.describe(),
        }
        try:
            status = subprocess.run(
                command, shell=True, env=environment, timeout=timeout, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124  # as timeout(1) says it
        if status:
            print(f"on-fault command ended with status {status}: {command}", file=sys.stderr)
        return status

    return run
