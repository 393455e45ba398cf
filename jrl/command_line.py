"""Setup that all command lines share: one-line errors, JAX devices, the compilation cache."""

import dis
import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import tyro

from jrl.checks import check_numbers
from jrl.processes.agreement import check_same_software
from jrl.processes.coordinator import (
    HEARTBEAT_SECONDS,
    SINGLE_PROCESS,
    Processes,
    check_devices,
    check_reachable,
    exit_without_waiting,
    join_processes,
)
from jrl.processes.stopping import DRAINED, INTERRUPTED

OUR_PACKAGES = ("jrl", "moe", "sharding", "benchmarks")
Options = TypeVar("Options")

MEMORY_REMEDY = "lower --micro-batch; --dry-run shows what needs the memory"
"""Advice for a device that is out of memory."""


def parse_flags(
    kind: type[Options] | Any,
    program: str,
    arguments: Sequence[str] | None,
    about: str | None = None,
) -> Options:
    """Parses a command line into a dataclass, whose numbers are finite.

    Args:
      program: the command, `jrl.program.program("serve")`.
      arguments: None takes those of this process.
      about: what it does, for ``--help``; None takes the docstring of the dataclass.
    """
    options = tyro.cli(kind, prog=program, description=about, args=arguments)
    check_numbers(options)
    return options


def exit_status(command: Callable[[], int], remedy: str = MEMORY_REMEDY) -> int:
    """Runs a command, and reports errors of the caller or the run in one line on standard error.

    A ValueError that a `raise` of this project made is an error of the caller. One that comes out
    of a library or a builtin is a fault of ours and keeps its traceback, as all other exceptions
    do.

    Args:
      remedy: advice for a device that is out of memory.

    Returns:
      The exit status: the command's own, 2 for wrong input, 1 for a run that failed or whose
      request the operating system rejected. In a run of multiple processes, one that cannot
      continue does not wait for the others.
    """
    status = None
    _replace_closed_streams()
    try:
        status = _exit_status(command, remedy)
        return status
    finally:
        # Processes end together with these, and close their connections in order.
        if status not in (0, 2, DRAINED, INTERRUPTED):
            exit_without_waiting(1 if status is None else status)


def _exit_status(command: Callable[[], int], remedy: str) -> int:
    try:
        status = command()
        sys.stdout.flush()  # at the end of Python its error would be a traceback
        return status
    except ValueError as error:
        if _raised_by_us(error.__traceback__):
            return _print_error(error, 2)
        # So JAX raises what goes wrong in a collective that runs as soon as it is enqueued.
        if (message := _lost_process(error)) is None:
            raise
        return _print_error(message, 1)
    except KeyboardInterrupt:
        exit_without_waiting(INTERRUPTED)
        return _print_error("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        _discard_output()
        return 1
    except OSError as error:
        if error.filename is not None:
            return _print_error(f"{error.filename}: {error.strerror}", 1)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        # The run's own files have names in their errors.
        _discard_output()
        return _print_error(
            "standard output or a library's file cannot be written: "
            f"{os.strerror(error.errno)}: make room on the disk, or redirect the output.",
            1,
        )
    except RuntimeError as error:
        if type(error).__module__.split(".")[0] in OUR_PACKAGES:
            return _print_error(error, 1)
        if (message_of_lost := _lost_process(error)) is not None:
            return _print_error(message_of_lost, 1)
        message = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        return _print_error(f"{message}: {remedy}.", 1)


def _replace_closed_streams() -> None:
    """Opens the null device for each standard stream that is closed: the next file to be opened
    would get its descriptor, and what libraries print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _discard_output() -> None:
    """Discards standard output from here on, if it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lost_process(error: Exception) -> str | None:
    """Message for an error in the connection between processes; None for any other error."""
    what = (str(error).splitlines() or [""])[0]
    if "Gloo" not in what and "SocketServer" not in what:
        return None
    return f"another process of the run has ended or cannot be reached: {what}"


def start_jax(
    devices: int | None, processes: Processes = SINGLE_PROCESS, heartbeat: int = HEARTBEAT_SECONDS
) -> None:
    """Chooses the devices before JAX starts, and turns on the compilation cache.

    Args:
      devices: number of fake CPU devices, the total over all processes; None takes the real ones.
      processes: those of the run; this one waits until all have joined.
      heartbeat: as of `join_processes`.

    Raises:
      ValueError: when JAX has started already with fewer, or cannot start, or has 64-bit types by
        default, or where the processes cannot connect.
    """
    processes.check()
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "JAX_ENABLE_X64 is on: indices and sums of a run are of 32 bits; unset it for this "
            "command (env -u JAX_ENABLE_X64 jrl train ...)."
        )
    share = processes.share(devices)
    if share is not None:
        _fake_devices(share)
    keep_compilations()
    join_processes(processes, heartbeat)
    try:
        jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX cannot start: {' '.join(str(error).split())}") from error
    except AssertionError as error:  # JAX's, of JAX_PLATFORMS=cuda where it sees no NVIDIA GPU
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"JAX cannot start: it finds no device for JAX_PLATFORMS={platforms!r}: leave that "
            "out, or see with nvidia-smi whether this machine shows its GPUs."
        ) from error
    if jax.distributed.is_initialized():  # by us, or by the launcher
        _check_processes()


@cache  # once for each process, not for each of its commands
def _check_processes() -> None:
    """Compares devices and software of the processes; from here on process 0 alone prints."""
    check_reachable()
    check_devices()
    check_same_software()


def keep_compilations() -> None:
    """Turns on JAX's persistent compilation cache; results are bitwise identical.

    JAX's own setting takes precedence (``JAX_COMPILATION_CACHE_DIR``; empty is off). Otherwise
    compiled functions are stored in ``jrl/compilations`` in the user's cache folder, unless that
    cannot be written.
    """
    setting = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if setting is not None:
        return
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        path = Path(root) / "jrl" / "compilations"
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError for a user without a home folder
        return
    if os.access(path, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _fake_devices(devices: int) -> None:
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1.")
    try:
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:  # JAX has started: what it has must do
        if jax.default_backend() != "cpu" or jax.local_device_count() < devices:
            raise ValueError(
                f"devices={devices} comes too late: this process has started JAX with "
                f"{jax.local_device_count()} devices; start a fresh one."
            ) from None


def _raised_by_us(traceback: TracebackType | None) -> bool:
    """True if the exception was raised by a `raise` statement in one of our modules."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    name = frame.f_globals.get("__name__", "")
    # What a builtin raises has no frame of its own, and JAX cuts its frames out: ours is at a call.
    at_raise = frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    # A module that is run with -m is called __main__.
    return at_raise and (name == "__main__" or name.split(".")[0] in OUR_PACKAGES)


def _print_error(error: Exception | str, status: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return status
