"""Init process of a sandbox: runs Python code in a child process, enforces its limits, and ends.

It is started by its path: ``init.py FD NAME=NUMBER...``, where the descriptor FD has the code, and
the names are fields of `Limits`, for example ``files=100``. In a sandbox it is process 1 of its PID
namespace, so the kernel kills all other processes when it exits. It exits when the code does, at a
limit, and when its standard input is closed, a pipe that the waiting process holds open. The code's
output goes to the standard output; the standard error has one line about its end, ``status N`` or
``stopped REASON``.

It imports little, as it starts for each piece of code: `json` or `signal` would take longer than
most of them.
"""

import ctypes
import os
import resource
import select
import sys
import time
from _signal import (  # pyright: ignore[reportMissingImports]
    SIG_DFL,
    SIGINT,
    SIGKILL,
    default_int_handler,
    signal,
)
from _thread import stack_size

ModuleType = type(sys)

KILLED_WITH_PARENT, DUMPABLE = 1, 4
"""Options of Linux's `prctl`: PR_SET_PDEATHSIG and PR_SET_DUMPABLE."""
INTERVAL = 0.02
"""Seconds between checks of memory, processes and files."""
WRITABLE = ("/tmp", "/dev/shm")
MIB = 2**20
MIN_STACK, MAX_STACK = 2**16, 8 * MIB
"""Bytes of a thread's stack: a multiple of the first, at most the second, Linux's default."""


class Limits:
    """Resource limits of the code.

    Attributes:
      seconds: seconds of wall-clock time, and of processor time.
      memory: bytes, of each process and of all in total.
      file: bytes of a file.
      files: number of files in the writable folders.
      processes: number of processes and threads.
      namespaced: 1 in a sandbox; 0 outside of one, when the other limits apply to single processes.
      count_processes: 1 if the kernel's process limit is one per user namespace.
    """

    def __init__(self, arguments: list[str]):
        numbers = dict(each.split("=") for each in arguments)
        self.seconds = float(numbers["seconds"])
        self.memory, self.file = int(numbers["memory"]), int(numbers["file"])
        self.files, self.processes = int(numbers["files"]), int(numbers["processes"])
        self.namespaced = numbers["namespaced"] == "1"
        self.count_processes = numbers["count_processes"] == "1"


def main() -> None:
    """Runs the code to its end or to a limit."""
    with os.fdopen(int(sys.argv[1]), "rb") as code_file:
        code_file.seek(0)
        code = code_file.read()
    limits = Limits(sys.argv[2:])
    # The code runs under the same user: it must not write to this process's memory, or signal it.
    prctl(KILLED_WITH_PARENT, SIGKILL)
    prctl(DUMPABLE, 0)
    signal(SIGINT, SIG_DFL)
    child = os.fork()
    if child == 0:
        run(limits, code)
        return
    report = watch(child, limits)
    if not limits.namespaced:
        end_group(child)
    os.write(2, report.encode() + b"\n")
    os._exit(0)


def end_group(leader: int) -> None:
    """Ends the remaining processes of a process group, if any."""
    try:
        os.killpg(leader, SIGKILL)
    except OSError:
        return


def prctl(option: int, value: int) -> None:
    """Linux's `prctl`; no effect on other systems."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if call is not None:
        call(option, value, 0, 0, 0)


def run(limits: Limits, code: bytes) -> None:
    """Runs the code as the main module of this process, within resource limits."""
    os.setsid()
    prctl(KILLED_WITH_PARENT, SIGKILL)
    prctl(DUMPABLE, 1)
    signal(SIGINT, default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(1, 2)
    os.closerange(3, 1024)
    restrict(limits)
    main_module = ModuleType("__main__")
    sys.modules["__main__"] = main_module
    sys.argv = ["code.py"]
    try:
        exec(compile(code, "code.py", "exec"), vars(main_module))
    except SystemExit:
        raise
    except BaseException as error:
        import linecache
        import traceback

        # Otherwise linecache would look for a file of that name, and the standard library has one.
        lines = [line + "\n" for line in code.decode("utf-8", "replace").splitlines()]
        linecache.cache["code.py"] = len(code), None, lines, "code.py"
        # Without the frames of this file.
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace and trace.tb_next))
        sys.exit(128 + SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def restrict(limits: Limits) -> None:
    """Sets the resource limits of this process and of all that it starts.

    Raises:
      OSError, ValueError: if one cannot be set, and the code runs in a sandbox.
    """
    values = {
        "RLIMIT_CPU": int(limits.seconds) + 1,
        "RLIMIT_AS": limits.memory,
        "RLIMIT_FSIZE": limits.file,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 256,
        "RLIMIT_MEMLOCK": 64 * 1024,
        "RLIMIT_MSGQUEUE": 0,
    }
    if limits.count_processes:
        values["RLIMIT_NPROC"] = limits.processes
    for name, value in values.items():
        try:
            kind = getattr(resource, name)
            most = resource.getrlimit(kind)[1]
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (value, value))
        except (AttributeError, OSError, ValueError):
            if limits.namespaced:
                raise
    # The stacks of all threads together are a quarter of the memory: 64 default ones would be all.
    stack = min(MAX_STACK, limits.memory // (4 * limits.processes))
    stack_size(max(stack // MIN_STACK, 1) * MIN_STACK)
    os.nice(5)  # the parent, which ends this process, has priority


def watch(child: int, limits: Limits) -> str:
    """Report on a child after it has ended or reached a limit."""
    end = time.monotonic() + limits.seconds
    closed = select.poll()
    closed.register(0, select.POLLIN)
    inside = limits.namespaced and os.path.exists("/proc/self/stat")
    interval = INTERVAL / 10
    while True:
        # Orphans of the code are children of process 1, and count as processes until waited for.
        while (reaped := poll_children())[0]:
            if reaped[0] == child:
                status = os.waitstatus_to_exitcode(reaped[1])
                return f"status {status if status >= 0 else 128 - status}"
        left = end - time.monotonic()
        if left <= 0:
            return f"stopped after {limits.seconds:g} seconds"
        if closed.poll(1000 * min(interval, left)):
            return "stopped: nobody waits for it"
        # Short intervals first: most programs end soon.
        interval = min(1.3 * interval, INTERVAL)
        if inside and (excess := find_excess(limits)):
            return f"stopped: {excess}"


def poll_children() -> tuple[int, int]:
    """The id and wait status of a child that has ended; the id is 0 if none has."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def find_excess(limits: Limits) -> str:
    """The limit that all processes of the sandbox together exceed, as a phrase; empty for none."""
    tasks, resident, page, pids = 0, 0, resource.getpagesize(), []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != "1":
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it has ended
            pids.append(pid)
            tasks += int(fields[17])
            resident += int(fields[21]) * page
    if tasks > limits.processes:
        return f"more than {limits.processes} processes"
    if resident > limits.memory and sum(map(proportional_memory, pids)) > limits.memory:
        return f"more than {limits.memory // MIB} MB of memory"
    for folder in WRITABLE:
        usage = os.statvfs(folder)
        if usage.f_files - usage.f_ffree > limits.files:
            return f"more than {limits.files} files"
    return ""


def proportional_memory(pid: str) -> int:
    """Memory of a process in bytes, with shared memory divided among its users."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    try:  # one that has made itself unreadable, or has ended
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
