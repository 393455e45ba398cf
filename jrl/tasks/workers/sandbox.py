"""The program that runs a policy's Python code, with what it may take cut down first.

It is started by its path: ``sandbox.py SETTINGS``, with the code on its standard input. SETTINGS is
JSON: `seconds` of processor time, `memory` and `file` in bytes, and whether it may have `network`.
Its exit status is that of the code, or `REFUSED` where a limit cannot be had.
"""

import ctypes
import json
import os
import resource
import sys
import traceback

REFUSED = 113
NEW_USER, NEW_PIDS, NEW_NETWORK, NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
DIES_WITH_PARENT, KILL = 1, 9


def main() -> None:
    """Cuts down, runs the code, and ends as it does."""
    _end_with_parent()
    settings, code = json.loads(sys.argv[1]), sys.stdin.read()
    try:
        _limit(settings)
        if not settings["network"]:
            _apart()
    except (OSError, ValueError) as error:
        print(f"the limits of the sandbox cannot be had: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    # The child is the first process of its own: whatever it starts ends with it.
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    _end_with_parent()
    sys.argv = ["code.py"]
    try:
        exec(compile(code, "code.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        # Its own lines alone: those of this program are nothing to it.
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace and trace.tb_next))
        sys.exit(1)


def _end_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None:  # Linux's
        prctl(DIES_WITH_PARENT, KILL)


def _limit(settings: dict) -> None:
    seconds = int(settings["seconds"]) + 1
    for kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, settings["memory"]),
        (resource.RLIMIT_FSIZE, settings["file"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def _apart() -> None:
    """A network without any device, and no view of other processes' messages."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None:
        raise OSError("this system has no way to take the network away")
    if unshare(NEW_USER | NEW_PIDS | NEW_NETWORK | NEW_IPC):
        code = ctypes.get_errno()
        raise OSError(code, f"the network cannot be taken away: {os.strerror(code)}")


if __name__ == "__main__":
    main()
