"""M-to-N communication: every device of one side sends a message to every device of the other.

All implementations have one contract. The inputs are N arrays over the M source devices: the shard
of the j-th array on the i-th source goes to the j-th target device. The results are M arrays over
the N target devices: the shard of the i-th array on the j-th target came from the i-th source. A
message is sent once and never reduced with another. The host does not block, except when "transfer"
first connects. Bytes sent: ``M N rows width itemsize`` for messages of ``[rows, width]``, whatever
they contain.
"""

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils, transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from moe.disaggregated.split import devices_of
from sharding.folding import FoldedMesh

Arrays = tuple[Array, ...]
UNION = "union"
MAX_NAME_BYTES = 256
"""Bytes of a host's name or of an address, at most."""
TIMEOUT_SECONDS = 600.0
"""Timeout of a message in seconds; the sender's programs may have to be compiled first."""
READ_BYTES = 2**24
"""Bytes of a message that a transfer server reads at a time; it reserves buffers of this size."""


class Message(NamedTuple):
    """Shape and dtype of the message from one device to another."""

    rows: int
    width: int
    dtype: Any

    @property
    def num_bytes(self) -> int:
        return self.rows * self.width * np.dtype(self.dtype).itemsize


def row_sharding(mesh: FoldedMesh) -> NamedSharding:
    """Sharding of arrays whose rows are split over all devices of `mesh`."""
    return NamedSharding(mesh.mesh, PartitionSpec(mesh.axes))


class Exchange:
    """Exchange of messages from one side to the other.

    Args:
      source, target: meshes that share no device.
    """

    def __init__(self, source: FoldedMesh, target: FoldedMesh):
        self._sources, self._targets = devices_of(source), devices_of(target)
        self._sharding = row_sharding(target)

    def __call__(self, arrays: Arrays | None, message: Message) -> Arrays | None:
        """Sends the messages of `arrays` to the other side.

        Args:
          arrays: an array for each target device; None in a process that has no source device.
          message: shape and dtype of each message.

        Returns:
          An array for each source device; None in a process that has no target device.
        """
        raise NotImplementedError

    def _assemble_all(self, shards_by_source: Iterable[Sequence[Array]]) -> Arrays:
        """Arrays over the target devices, from the messages that this process received."""
        num_targets = len(self._targets)
        return tuple(_assemble(shards, num_targets, self._sharding) for shards in shards_by_source)


class DevicePut(Exchange):
    """Copies between devices of one process, by one `jax.device_put` for all messages.

    Raises:
      ValueError: if other processes have some of the devices.
    """

    def __init__(self, source: FoldedMesh, target: FoldedMesh):
        if not _is_single_process(source, target):
            raise ValueError(
                'm2n="device_put" needs all devices in one process, but other processes have some '
                'of them: use "collective".'
            )
        super().__init__(source, target)

    def __call__(self, arrays: Arrays | None, message: Message) -> Arrays | None:
        assert arrays is not None
        shards_by_device = [_shards(array) for array in arrays]
        messages = [shards[source] for source in self._sources for shards in shards_by_device]
        # One call for all copies, so that the host dispatches them together and does not wait.
        received = jax.device_put(messages, self._targets * len(self._sources))
        num_targets = len(self._targets)
        starts = range(0, len(received), num_targets)
        return self._assemble_all(received[start : start + num_targets] for start in starts)


class Collective(Exchange):
    """Collective-permutes over the union of both sides in one compiled program; between processes
    by Gloo or NCCL.

    In round r of ``max(M, N)`` the i-th source sends to the target ``(i + r) mod max(M, N)``, if
    there is one: no device sends or receives two messages in a round. Arrays over the union are
    assembled from existing buffers, without copies; each device of the other side contributes a
    buffer of zeros, which is not sent. If a program failed, for an error or the exit of a peer,
    the programs of later exchanges fail and do not run: the other processes would wait for messages
    that were never sent.
    """

    def __init__(self, source: FoldedMesh, target: FoldedMesh):
        super().__init__(source, target)
        devices, auto = np.array([*self._sources, *self._targets]), jax.sharding.AxisType.Auto
        # One axis over all devices of both sides, in one program: every process runs it.
        mesh = Mesh(devices, (UNION,), axis_types=(auto,))
        self._union = NamedSharding(mesh, PartitionSpec(UNION))

    def __call__(self, arrays: Arrays | None, message: Message) -> Arrays | None:
        process, num_devices = jax.process_index(), len(self._sources) + len(self._targets)
        local_devices = [d for d in (*self._sources, *self._targets) if d.process_index == process]
        # An array over the union needs a buffer on each device, also on those that send nothing.
        zeros = {d: _zeros(message, d) for d in local_devices}
        local_shards = [{}] * len(self._targets) if arrays is None else map(_shards, arrays)
        shards_to_send = [zeros | shard_of for shard_of in local_shards]
        ordering_tokens = _ordering_tokens(frozenset(local_devices))
        inputs = [
            _assemble([shard_of[d] for d in local_devices], num_devices, self._union)
            for shard_of in (*shards_to_send, ordering_tokens)
        ]
        *received, new_token = _permute_program(
            self._union, len(self._sources), len(self._targets)
        )(*inputs)
        # In place, for the next exchange between these devices: see `_permute_program`.
        ordering_tokens |= _shards(new_token)
        local_targets = [d for d in self._targets if d.process_index == process]
        if not local_targets:
            return None
        return self._assemble_all(
            [shard_of[d] for d in local_targets] for shard_of in map(_shards, received)
        )


class DirectTransfer(Exchange):
    """Reads from the memory of the other process (`jax.experimental.transfer`): a source offers its
    messages and the target pulls them, one offer for each pair of processes. Messages within a
    process are copied from device to device.

    No program spans both sides, so that a process waits only for messages that its own programs
    read. Every process must make the same exchanges in the same order. An error or exit of a peer,
    or a message that does not arrive within `TIMEOUT_SECONDS`, raises where the message is awaited.
    """

    def __init__(self, source: FoldedMesh, target: FoldedMesh):
        super().__init__(source, target)
        self._server = _transfer_server()

    def __call__(self, arrays: Arrays | None, message: Message) -> Arrays | None:
        process, received = jax.process_index(), dict[tuple[int, int], Array]()
        if arrays is not None:
            shards_by_device = [_shards(array) for array in arrays]
            # One offer per pair of processes, not of devices: each has a fixed cost.
            for to in _process_ids(self._targets):
                pairs = self._pairs(process, to)
                messages = [shards_by_device[j][self._sources[i]] for i, j in pairs]
                if to == process:
                    devices = [self._targets[j] for _, j in pairs]
                    received |= zip(pairs, jax.device_put(messages, devices), strict=True)
                else:
                    self._server.offer(to, messages)
        if process not in _process_ids(self._targets):
            return None
        # Offers come before pulls: two processes that are both source and target never deadlock.
        for sender in _process_ids(self._sources):
            if sender != process:
                pairs = self._pairs(sender, process)
                devices = [self._targets[j] for _, j in pairs]
                received |= zip(pairs, self._server.pull(sender, message, devices), strict=True)
        local_targets = _local_indices(self._targets, process)
        return self._assemble_all(
            [received[i, j] for j in local_targets] for i in range(len(self._sources))
        )

    def _pairs(self, sender: int, to: int) -> list[tuple[int, int]]:
        """Index pairs (source, target) of the devices of one process that send to devices of
        another."""
        targets = _local_indices(self._targets, to)
        return [(i, j) for i in _local_indices(self._sources, sender) for j in targets]


class _TransferServer:
    """The transfer server of this process, and its connections to the others.

    All processes construct it at the same time, as it gathers their addresses. An offer has an id
    that is unique on its server: both ends count the offers between them.
    """

    def __init__(self):
        host = reachable_host(_all_gather_text(socket.gethostname()), jax.process_index())
        # Besides the server's address there must be one for the data: without it processes do not
        # connect.
        self._server = transfer.start_transfer_server(
            jax.local_devices()[0].client, f"{host}:0", [f"{host}:0"], transfer_size=READ_BYTES
        )
        self._addresses = _all_gather_text(self._server.address())
        self._connections: dict[int, Any] = {}
        # Per pair of processes, as exchanges of different pairs may interleave.
        self._counts = Counter[tuple[int, int]]()
        self._watch = _Watch(self._addresses)

    def offer(self, to: int, messages: list[Array]) -> None:
        """Offers messages to a process, which pulls them once."""
        self._server.await_pull(self._transfer_id(jax.process_index(), to), messages)

    def pull(self, sender: int, message: Message, devices: list[Any]) -> list[Array]:
        """Pulls the messages that a process offers to this one, one for each of the devices."""
        # Connected at the first pull: not every pair of processes exchanges messages.
        if sender not in self._connections:
            _check_listens(sender, self._addresses[sender])
            self._connections[sender] = self._server.connect(self._addresses[sender])
        shape, shardings = (message.rows, message.width), map(SingleDeviceSharding, devices)
        shapes = [
            jax.ShapeDtypeStruct(shape, message.dtype, sharding=sharding) for sharding in shardings
        ]
        messages = self._connections[sender].pull(
            self._transfer_id(sender, jax.process_index()), shapes
        )
        # One message is watched for all of the pull: they were offered together.
        self._watch.expect(sender, messages[-1])
        return messages

    def _transfer_id(self, sender: int, to: int) -> int:
        # Both ends compute the same id and send no message for it: the count of their exchanges so
        # far, made unique on the sender's server by the receiver's index.
        self._counts[sender, to] += 1
        return self._counts[sender, to] * jax.process_count() + to


_transfer_server = cache(_TransferServer)


class _Watch:
    """Watchdog that closes the connection to a process whose messages do not arrive: programs that
    wait for one then fail as if that process had exited.

    A program waits for pulled messages forever, in code that Python cannot interrupt. For
    each sender only two messages are referenced: the one that is awaited, and the newest.
    """

    def __init__(self, addresses: Sequence[str]):
        self._addresses, self._lock = addresses, threading.Lock()
        self._awaited: dict[int, tuple[Array, float]] = {}
        self._newest: dict[int, Array] = {}
        threading.Thread(target=self._run, name="moe messages", daemon=True).start()

    def expect(self, sender: int, message: Array) -> None:
        """Adds a message to watch, after the expected messages of this sender."""
        with self._lock:
            self._newest[sender] = message
            self._awaited.setdefault(sender, (message, time.monotonic()))

    def _run(self) -> None:
        log_format = (
            'm2n="transfer": process %d has sent nothing for %g s; its connection is closed'
        )
        while True:
            time.sleep(TIMEOUT_SECONDS / 100)
            with self._lock:
                overdue = [sender for sender in list(self._awaited) if self._is_overdue(sender)]
            for sender in overdue:
                logging.getLogger(__name__).error(log_format, sender, TIMEOUT_SECONDS)
                _disconnect(self._addresses[sender])

    def _is_overdue(self, sender: int) -> bool:
        message, since = self._awaited[sender]
        # Messages of a sender arrive in order. When the awaited one is here, the newest is next:
        # the timeout starts again, and no reference to those in between keeps their memory.
        if not _has_arrived(message):
            return time.monotonic() > since + TIMEOUT_SECONDS
        del self._awaited[sender]
        if not _has_arrived(newest := self._newest.pop(sender)):
            self._newest[sender], self._awaited[sender] = newest, (newest, time.monotonic())
        return False


def _has_arrived(message: Any) -> bool:
    # A RuntimeError means that it was donated to a program, or that an error came instead.
    with contextlib.suppress(RuntimeError):
        return message.is_ready()
    return True


def _check_listens(process: int, address: str) -> None:
    """Raises RuntimeError if no process listens at an address; JAX would wait and raise no
    error."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), TIMEOUT_SECONDS).close()
    except OSError as error:
        raise RuntimeError(f"SocketServer: process {process} at {address}: {error}") from error


def _disconnect(address: str) -> None:
    """Shuts down this process's connections to an address; JAX has no call for it while a pull is
    in flight."""
    host, _, port = address.rpartition(":")
    # JAX does not expose its sockets, so they are found among the open file descriptors. A
    # duplicate is shut down and closed: JAX's own descriptor stays valid, and reads from it fail.
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    if duplicate.getpeername()[:2] == (host, int(port)):
                        duplicate.shutdown(socket.SHUT_RDWR)


def reachable_host(names: Sequence[str], process: int) -> str:
    """Address by which the other processes reach the host of a process.

    Args:
      names: host names of all processes, by their index.

    Raises:
      ValueError: if the host's name resolves to no address that others can reach.
    """
    if len(set(names)) == 1:
        return "127.0.0.1"
    name, addresses = names[process], list[Any]()
    with contextlib.suppress(socket.gaierror):
        addresses = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    # Many systems resolve their own name to a loopback address, which others cannot reach.
    for *_, socket_address in addresses:
        if not (address := str(socket_address[0])).startswith("127."):
            return address
    raise ValueError(
        f'm2n="transfer" needs an address by which other hosts reach {name!r}, but the name '
        'resolves to none: add one to DNS or /etc/hosts, or use "collective".'
    )


IMPLEMENTATIONS = {"device_put": DevicePut, "collective": Collective, "transfer": DirectTransfer}


def make_exchange(name: str | None, source: FoldedMesh, target: FoldedMesh) -> Exchange:
    """Constructs the named implementation; None is "device_put" if one process has all devices,
    else "collective".

    Raises:
      ValueError: on an unknown name, or one that is not supported on these devices.
    """
    if name is None:
        name = "device_put" if _is_single_process(source, target) else "collective"
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"m2n={name!r} is not known: choose among {', '.join(IMPLEMENTATIONS)}, or None for "
            "the best that applies."
        )
    return IMPLEMENTATIONS[name](source, target)


@cache
def _permute_program(union: NamedSharding, sources: int, targets: int) -> Any:
    rounds = max(sources, targets)

    def permute(*inputs: Array) -> Arrays:
        # An ordering token, as of JAX's ordered effects, is the result of each exchange and an
        # argument of the next, which therefore fails if the one before failed. The barrier orders
        # all permutes after it.
        *arrays, ordering_token = lax.optimization_barrier(inputs)
        rank, stacked = lax.axis_index(UNION), jnp.stack(arrays)
        received = jnp.zeros((sources, *arrays[0].shape), arrays[0].dtype)
        received = lax.pcast(received, (UNION,), to="varying")
        # One permute per round: pairs of a permute must have distinct sources and targets.
        for round_index in range(rounds):
            targets_of_round = [(i + round_index) % rounds for i in range(sources)]
            pairs = [(i, sources + j) for i, j in enumerate(targets_of_round) if j < targets]
            # Targets and idle sources select a message too, as all devices run the same code; it is
            # not sent.
            target = jnp.minimum((rank + round_index) % rounds, targets - 1)
            message = lax.ppermute(stacked[target], UNION, pairs)
            # A device that receives nothing in this round writes past the end, which has no effect.
            source = (rank - sources - round_index) % rounds
            source = jnp.where((rank >= sources) & (source < sources), source, sources)
            received = received.at[source].set(message, mode="drop")
        return *received, ordering_token

    spec = PartitionSpec(UNION)
    return jax.jit(jax.shard_map(permute, mesh=union.mesh, in_specs=spec, out_specs=spec))


@cache
def _ordering_tokens(devices: frozenset[Any]) -> dict[Any, Array]:
    """Ordering token of the last exchange between these devices, on each of them; zeros before the
    first."""
    return {device: _zeros(Message(1, 1, np.dtype(np.int32)), device) for device in devices}


def _all_gather_text(text: str) -> list[str]:
    """All-gathers a text from every process."""
    padded = np.frombuffer(text.encode().ljust(MAX_NAME_BYTES, b"\0"), np.uint8)
    texts = multihost_utils.process_allgather(padded, tiled=False)
    return [bytes(row).rstrip(b"\0").decode() for row in np.asarray(texts).reshape(-1, padded.size)]


def _process_ids(devices: Sequence[Any]) -> list[int]:
    return sorted({device.process_index for device in devices})


def _local_indices(devices: Sequence[Any], process: int) -> list[int]:
    return [i for i, device in enumerate(devices) if device.process_index == process]


def _is_single_process(source: FoldedMesh, target: FoldedMesh) -> bool:
    return _process_ids([*devices_of(source), *devices_of(target)]) == [jax.process_index()]


def _shards(array: Array) -> dict[Any, Array]:
    """Shards of an array on the devices of this process."""
    shards = [array.addressable_data(i) for i in range(len(array.sharding.addressable_devices))]
    return {next(iter(shard.devices())): shard for shard in shards}


def _assemble(shards: Sequence[Array], num_shards: int, sharding: NamedSharding) -> Array:
    """Assembles an array of `num_shards` equal shards from this process's shards, copying
    nothing."""
    rows, *rest = shards[0].shape
    return jax.make_array_from_single_device_arrays(
        (num_shards * rows, *rest), sharding, list(shards)
    )


@cache
def _zeros(message: Message, device: Any) -> Array:
    return jax.device_put(np.zeros((message.rows, message.width), message.dtype), device)
