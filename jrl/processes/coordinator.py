"""Start and shutdown of the processes of a run, through `jax.distributed`, and their messages
through JAX's coordination service, for which no device is used.

Gloo announces the address of a machine's own name. On Debian and Ubuntu the hosts file gives that
name 127.0.1.1, which means another machine on every machine: the processes then wait for each other
until a time limit. So `check_reachable` looks at the addresses before the first collective.
"""

import atexit
import contextlib
import ipaddress
import json
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
    "with jrl launch --jobset, which needs neither."
)
SLURM_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables that JAX needs beside SLURM_JOB_ID."""
GRACE_SECONDS = 10.0
"""Most seconds for which process 0, without which JAX ends the others, lets them print their own
errors."""
HOSTS_FILE = "/etc/hosts"
PATIENCE_SECONDS = 2
"""Seconds of one request for a value of another process; requests are repeated."""


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
    # JAX's warning that a package is missing: one line below says so.
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


def check_reachable() -> None:
    """Raises ValueError, in all processes, if one announces to other machines an address of its own
    machine alone (for example 127.0.1.1): with the machine, and the line for its hosts file."""
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    target = _resolve(coordinator_address()[0])
    descriptions = exchange(
        "addresses",
        json.dumps(
            {
                "name": socket.gethostname(),
                "local": None if target is None else _local_address(target),
                "announced": _resolve(socket.gethostname()),
                "target": target,
            }
        ),
    )
    if (message := unreachable([json.loads(text) for text in descriptions])) is not None:
        raise ValueError(message)


def unreachable(processes: list[dict[str, str | None]]) -> str | None:
    """Message for the first process that the others cannot reach; None if they can reach all.

    Args:
      processes: of each its machine's name, its address on the way to process 0, the address that
        it announces, and the address of process 0 as it sees it.
    """
    if len({_is_loopback(each["local"]) or each["local"] for each in processes}) == 1:
        return None  # all on one machine
    for index, each in enumerate(processes):
        if not _is_loopback(each["announced"]):
            continue
        # Process 0 sees itself as itself; the others see its address.
        seen = [other["target"] for other in processes[1:]] if index == 0 else [each["local"]]
        address = next((a for a in seen if not _is_loopback(a)), None) or "ITS-ADDRESS"
        return (
            f"process {index} on the machine {each['name']} announces {each['announced']}, which "
            f"no other machine can reach, as {HOSTS_FILE} there gives it to the machine's own "
            f"name: let it have the line '{address} {each['name']}' instead."
        )
    return None


def _resolve(host: str) -> str | None:
    """First address of a name; None if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _local_address(target: str) -> str | None:
    """This machine's address on the way to `target`; nothing is sent."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address.partition("%")[0]).is_loopback


class ProcessFailed(RuntimeError):
    """Failure of the same work in another process, or the end of the wait for it."""


class BackgroundGather:
    """All-gather of JSON values among the background threads of all processes.

    A thread that entered a collective of devices beside the main thread would meet another
    collective of the other processes. Every process makes one for the same work and calls it
    equally often. In a run of one process it returns its argument.

    Args:
      name: name of the work; the same in all processes, and used once in a program.

    Attributes:
      waits: event that is set as soon as this process waits for the others.
    """

    def __init__(self, name: str):
        self.waits = threading.Event()
        self._prefix, self._round = f"jrl/{name}", 0
        self._abandoned = threading.Event()
        self._process, self._count = jax.process_index(), jax.process_count()

    def __call__(self, value: Any) -> list[Any]:
        """Values of all processes, in the order of their ids.

        Raises:
          ProcessFailed: where the work of another process has failed, or was abandoned here.
        """
        if self._count == 1:
            return [value]
        self._publish({"value": value})
        self.waits.set()
        received = [self._receive(process) for process in range(self._count)]
        self._round += 1
        for process, message in enumerate(received):
            if "failed" in message:
                raise ProcessFailed(f"process {process}: {message['failed']}")
        return [message["value"] for message in received]

    def fail(self, reason: str) -> None:
        """Raises `ProcessFailed` in the other processes, which wait for this one."""
        if self._count > 1:
            self._publish({"failed": reason})

    def abandon(self) -> None:
        """Ends all waiting in this process, from any thread: another process may have ended."""
        self._abandoned.set()

    def clear(self) -> None:
        """Removes the values from the service, when all processes have received them."""
        if self._count > 1 and self._process == 0:
            service_client().key_value_delete(f"{self._prefix}/")

    def _key(self, process: int) -> str:
        return f"{self._prefix}/{self._round}/{process}"

    def _publish(self, message: dict[str, Any]) -> None:
        # A process that fails after it has published a value of this round is heard in the next.
        service_client().key_value_set(
            self._key(self._process), json.dumps(message), allow_overwrite=True
        )

    def _receive(self, process: int) -> dict[str, Any]:
        while True:
            try:
                text = service_client().blocking_key_value_get(
                    self._key(process), 1000 * PATIENCE_SECONDS
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ProcessFailed(f"process {process} cannot be reached") from error
            else:
                return json.loads(text)
            if self._abandoned.is_set():
                raise ProcessFailed(f"process {process} was not waited for, as this one ends")
