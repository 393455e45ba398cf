"""What the command lines share: errors as one line, JAX's devices, compiled programs kept."""

import dis
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import jax

from jrl.processes.coordinator import ALONE, Processes, join, leave_at_once, look_over

OUR_PACKAGES = ("jrl", "moe", "sharding")
OF_TRAINING = "lower --micro-batch; --dry-run shows what needs the memory"
"""What to do where a device has no memory left."""


def exit_status(command: Callable[[], int], remedy: str = OF_TRAINING) -> int:
    """Runs a command, and says in one line on standard error what the caller or the run did wrong.

    A ValueError that a `raise` of this project made speaks to the caller. One that comes out of a
    library or a builtin is a fault of ours and keeps its traceback, as all other exceptions do.

    Args:
      remedy: what to do where a device has no memory left.

    Returns:
      The exit status: the command's own, 2 for wrong input, 1 for a run that failed or that the
      operating system refused something. Of several processes one that could not go on alone does
      not wait for the others.
    """
    status = None
    try:
        status = _exit_status(command, remedy)
        return status
    finally:
        if status not in (0, 2):
            leave_at_once(1 if status is None else status)


def _exit_status(command: Callable[[], int], remedy: str) -> int:
    try:
        return command()
    except ValueError as error:
        if _raised_by_us(error.__traceback__):
            return _say(error, 2)
        # So JAX raises what goes wrong in a collective that runs as soon as it is enqueued.
        if (what := _lost_process(error)) is None:
            raise
        return _say(what, 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # whoever read the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        return _say(f"{error.filename}: {error.strerror}", 1)
    except RuntimeError as error:
        if type(error).__module__.split(".")[0] in OUR_PACKAGES:
            return _say(error, 1)
        if (lost := _lost_process(error)) is not None:
            return _say(lost, 1)
        what = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in what:
            raise
        return _say(f"{what}: {remedy}.", 1)


def _lost_process(error: Exception) -> str | None:
    """What to say of an error of what connects the processes; None of any other."""
    what = (str(error).splitlines() or [""])[0]
    if "Gloo" not in what and "SocketServer" not in what:
        return None
    return f"another process of the run has ended or cannot be reached: {what}"


def start_jax(devices: int | None, processes: Processes = ALONE) -> None:
    """Chooses the devices before JAX touches any, and keeps what it compiles.

    Args:
      devices: number of fake CPU devices, of all processes together; None takes the
        real ones.
      processes: those of the run; this one waits until all are there.

    Raises:
      ValueError: when JAX has started already with fewer, or cannot start, or where the processes
        do not meet.
    """
    processes.check()
    share = processes.share(devices)
    if share is not None:
        _fake_devices(share)
    keep_compilations()
    has_joined = join(processes)
    try:
        jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX cannot start: {' '.join(str(error).split())}") from error
    except AssertionError as error:  # JAX's, of JAX_PLATFORMS=cuda where it sees no NVIDIA GPU
        asked = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"JAX cannot start: it finds no device for JAX_PLATFORMS={asked!r}: leave that out, or "
            "see with nvidia-smi whether this machine shows its GPUs."
        ) from error
    if has_joined:
        look_over()


def keep_compilations() -> None:
    """Lets the next start load what this one compiles; the results are the same to the bit.

    JAX's own setting comes first (``JAX_COMPILATION_CACHE_DIR``; empty is off). Otherwise the
    programs go to ``jrl/compilations`` in the user's cache folder, unless that cannot be written.
    """
    setting = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if setting is not None:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    path = Path(root) / "jrl" / "compilations"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
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
        if jax.default_backend() != "cpu" or jax.device_count() < devices:
            raise ValueError(
                f"devices={devices} comes too late: this process has started JAX with "
                f"{jax.device_count()} devices; start a fresh one."
            ) from None


def _raised_by_us(traceback: TracebackType | None) -> bool:
    """Whether the exception began at a `raise` statement in one of our modules."""
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


def _say(error: Exception | str, status: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return status
