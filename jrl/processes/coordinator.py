"""Start and shutdown of the processes of a run, through `jax.distributed`."""

import atexit
import contextlib
import os
import socket
import stat
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
from jax._src.distributed import global_state

from jrl.checks import check_range
from jrl.processes import rendezvous

AUTO = "auto"
SHUTDOWN_SECONDS = 60
"""Seconds that a process waits at its end for processes that have not ended."""
HEARTBEAT_SECONDS = 100
"""Default timeout of a heartbeat in seconds, after which JAX ends all processes."""
KUBERNETES_REMEDY = (
    "give the pods a service account that may read pods, jobs and services; or write the JobSet "
    "with python -m jrl.launch --jobset, which needs neither."
)
SLURM_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables that JAX needs beside SLURM_JOB_ID."""
GRACE_SECONDS = 10.0
"""Most seconds for which process 0, without which JAX ends the others, lets them print their own
errors."""


@dataclass(frozen=True)
class Processes:
    """Settings of the processes of a run; they are not saved with the run."""

    coordinator: str | None = None
    """Address of process 0, HOST:PORT, for a multi-process run; auto detects it from the cluster
    (SLURM, Open MPI, Kubernetes, Cloud TPU). All processes are started with the same flags except
    --process-id."""
    num_processes: int | None = None
    """Number of processes of the run; --devices counts the devices of all of them."""
    process_id: int | None = None
    """Index of this process, from 0. Process 0 writes the run folder."""
    coordinator_timeout: int = 300
    """Seconds that the processes wait for each other at startup."""

    def check(self) -> None:
        """Raises ValueError for settings that cannot be."""
        count, index = self.num_processes, self.process_id
        if self.coordinator is None:
            if count is not None or index is not None:
                raise ValueError(
                    f"num_processes={count}, process_id={index} need --coordinator HOST:PORT, the "
                    "same in all processes."
                )
            return
        if self.coordinator != AUTO:
            _parse_address(self.coordinator)
            if count is None or index is None:
                raise ValueError(
                    f"coordinator={self.coordinator!r} needs --num-processes and --process-id."
                )
        check_range(self, ("num_processes",), 1)
        if index is not None and (index < 0 or (count is not None and index >= count)):
            last = "" if count is None else count - 1
            raise ValueError(f"process_id={index} must lie in 0..{last}.")
        if self.coordinator_timeout < 1:
            raise ValueError(
                f"coordinator_timeout={self.coordinator_timeout} must be at least 1 second."
            )

    def share(self, devices: int | None) -> int | None:
        """Number of simulated devices of this process; ValueError where `devices`, of all of them,
        is not divisible by the number of processes."""
        count = self.num_processes
        if jax.distributed.is_initialized():  # perhaps by a launcher, without our flags
            count = global_state.num_processes
        elif self.coordinator is None:
            count = 1
        if devices is None:
            return None
        if count is None:
            raise ValueError(f"devices={devices} over multiple processes needs --num-processes.")
        if devices % count:
            raise ValueError(
                f"devices={devices} cannot be shared by num_processes={count}: choose a multiple "
                "of it."
            )
        return devices // count


SINGLE_PROCESS = Processes()
"""A run of one process."""


def join_processes(processes: Processes, heartbeat: int = HEARTBEAT_SECONDS) -> None:
    """Connects this process with the others, before JAX touches any device.

    Nothing is done in a run of one process, and if it is connected already: by an earlier command,
    or by a launcher, for example Ray.

    Args:
      processes: settings of this one.
      heartbeat: timeout of a heartbeat in seconds, after which JAX ends all processes and names
        none.

    Raises:
      ValueError: where the coordinator cannot be reached, or not all processes join in time.
    """
    coordinator = processes.coordinator
    if coordinator is None or jax.distributed.is_initialized():
        return
    if coordinator == AUTO:
        _initialize(processes, heartbeat)
        return
    # JAX aborts a process that cannot connect, with a long report: what can be checked is checked
    # before.
    address, seconds = _parse_address(coordinator), float(processes.coordinator_timeout)
    count, index = processes.num_processes, processes.process_id
    assert count is not None and index is not None  # `check` has looked
    if index == 0:
        rendezvous.host(address, coordinator, count, seconds)
    else:
        rendezvous.join(address, coordinator, count, index, seconds)
    _initialize(processes, heartbeat)


def check_devices() -> None:
    """Raises ValueError in all joined processes if they have different numbers of devices; else
    mutes stdout of all but the first."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{counts[index]} in process {index}" for index in sorted(counts))
        raise ValueError(
            f"every process needs the same number of devices; there are {counts_text}."
        )
    _redirect_stdout(jax.process_index() == 0)


def exit_without_waiting(status: int) -> None:
    """Ends this process with `status` at its exit without waiting for the others.

    They see its connections close. It is for errors of this process only.
    """
    if jax.distributed.is_initialized():
        # JAX would wait for the others, and they for this process, in the middle of a collective.
        atexit.register(exit_now, status)


def exit_now(status: int, silent: int = 0) -> None:
    """Ends this process immediately, from any thread; process 0 waits for the others except for
    `silent` of them, which cannot end by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.distributed.is_initialized() and jax.process_index() == 0:
        _wait_for_others(silent)
    os._exit(status)


def exit_after(seconds: float, status: int) -> None:
    """Ends this process after so many seconds, unless it has ended before."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


def _wait_for_others(silent: int) -> None:
    """Closes this process's connections except the coordinator's, and waits for the others.

    The others notice it and end; the wait is until they have left the coordinator too, except
    `silent` of them, and at most `GRACE_SECONDS` seconds.
    """
    port = coordinator_address()[1]
    for connection in _connections():
        if port not in (connection.getsockname()[1], connection.getpeername()[1]):
            connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + GRACE_SECONDS
    # One of those that are connected with the coordinator is this process.
    while sum(each.getsockname()[1] == port for each in _connections()) > 1 + silent:
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def coordinator_address() -> tuple[str, int]:
    """Host and port of the coordinator, read from JAX, as "auto" does not give them."""
    assert global_state.coordinator_address is not None
    return _parse_address(global_state.coordinator_address)


def process_id() -> int:
    """Index of this process, without starting JAX's devices; 0 before it has joined."""
    return global_state.process_id


def service_client() -> Any:
    """Client of JAX's coordination service, in a program of several processes."""
    assert global_state.client is not None
    return global_state.client


def exchange(name: str, value: str) -> list[str]:
    """Values of all processes, in the order of their ids, through the coordinator: no device is
    used. To be called once with a name."""
    client = service_client()
    client.key_value_set(f"jrl/{name}/{jax.process_index()}", value)
    return [
        client.blocking_key_value_get(f"jrl/{name}/{process}", 1000 * SHUTDOWN_SECONDS)
        for process in range(jax.process_count())
    ]


class KeyValueStore:
    """Texts of the processes of a run, under one name, in JAX's coordination service, which process
    0 has.

    No device is used. Calls block without holding up Python while process 0 does not answer, and
    raise RuntimeError if it cannot be reached.
    """

    def __init__(self, name: str):
        self._client, self._name = service_client(), f"jrl/{name}"

    def publish(self, text: str) -> None:
        """Replaces the text of this process."""
        self._client.key_value_set(
            f"{self._name}/{jax.process_index()}", text, allow_overwrite=True
        )

    def read(self) -> dict[int, str]:
        """Texts by process, of those that have published one."""
        texts = self._client.key_value_dir_get(self._name)
        return {int(key.rpartition("/")[2]): text for key, text in texts}


def _connections() -> Iterator[socket.socket]:
    """Connected TCP sockets of this process."""
    families = (socket.AF_INET, socket.AF_INET6)
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in families and connection.getpeername():
                    yield connection


def _redirect_stdout(first: bool) -> None:
    """Redirects output that libraries write to file descriptor 1, as Gloo does per connection.

    In the first process it goes to standard error, and Python's standard output remains the user's.
    In the others both are discarded.
    """
    sys.stdout.flush()
    descriptor = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    sys.stdout = os.fdopen(
        descriptor, "w", 1, encoding=sys.stdout.encoding, errors=sys.stdout.errors
    )
    os.dup2(2 if first else descriptor, 1)


def _parse_address(address: str) -> tuple[str, int]:
    """Host and port of a coordinator."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"coordinator={address!r} must be HOST:PORT with a port in 1..65535, for example "
            "10.0.0.1:7733, or auto."
        )
    return host.strip("[]"), int(port)


def _initialize(processes: Processes, heartbeat: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler of SIGTERM would replace the run's own.
    jax.config.update("jax_enable_preemption_service", False)
    auto, seconds = processes.coordinator == AUTO, processes.coordinator_timeout
    # JAX aborts a process whose wait times out with a long report: this is earlier, and one line.
    alarm = threading.Timer(seconds, _abort_start, (processes,))
    alarm.daemon = True
    alarm.start()
    # JAX's warning that a package is missing, which is said in one line below.
    warnings.filterwarnings("ignore", "Kubernetes environment detected")
    try:
        jax.distributed.initialize(
            None if auto else processes.coordinator,
            processes.num_processes,
            processes.process_id,
            initialization_timeout=2 * seconds,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            cluster_detection_method=None if auto else "deactivate",
        )
    except ValueError as error:
        if not auto:
            raise
        raise ValueError(_no_cluster(str(error))) from error
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        if line.startswith("Kubernetes API Error"):
            raise ValueError(f"coordinator='auto': {line}: {KUBERNETES_REMEDY}") from error
        raise ValueError(
            f"coordinator={processes.coordinator!r}: the processes did not connect ({line})."
        ) from error
    except Exception as error:  # of the client of Kubernetes, which may not be installed
        if not auto or type(error).__module__.partition(".")[0] != "kubernetes":
            raise
        line = str(error).splitlines()[0]
        raise ValueError(f"coordinator='auto': {line}: {KUBERNETES_REMEDY}") from error
    finally:
        alarm.cancel()


def _no_cluster(reason: str) -> str:
    """Message for a machine where JAX detects no cluster."""
    by_hand = "give --coordinator HOST:PORT, --num-processes and --process-id."
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        if find_spec("kubernetes") is None:
            return (
                "coordinator='auto' needs the package kubernetes here: pip install 'jax[k8s]', and "
                f"{KUBERNETES_REMEDY}"
            )
    elif "SLURM_JOB_ID" in os.environ:
        missing = [name for name in SLURM_VARIABLES if name not in os.environ]
        return (
            f"coordinator='auto': {', '.join(missing)} missing, which srun sets: start the "
            f"processes with srun, or {by_hand}"
        )
    return f"coordinator='auto' finds no cluster that JAX supports ({reason}): {by_hand}"


def _abort_start(processes: Processes) -> None:
    count = processes.num_processes or "some"
    print(
        f"error: coordinator={processes.coordinator!r}: not all of {count} processes connected "
        f"within {processes.coordinator_timeout} s: start them, or raise --coordinator-timeout.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def all_arrive(name: str, seconds: float) -> bool:
    """True if all processes call this with the same name within `seconds`; no device is used."""
    if global_state.client is None or jax.process_count() == 1:
        return True
    try:
        global_state.client.wait_at_barrier(name, timeout_in_ms=round(1000 * seconds))
    except RuntimeError:  # DEADLINE_EXCEEDED, or a process that is gone
        return False
    return True
