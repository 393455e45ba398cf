"""Collectives on host values that keep the processes of a multi-process run in agreement.

Every process computes the same host values from the same seed and runs the same compiled functions
in the same order. What could differ between them (a verifier that timed out, a signal, files on
disk) is decided by one of them, or by all together, through the functions of this file. In a run of
one process they return their argument.

All of them but `is_main_process`, `is_multiprocess`, `to_devices` and those that describe the
software of this process are collectives: every process has to call them, in the same order.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jrl.processes.progress import AGREEMENT, phase
from sharding.collectives import all_sum, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import DeviceJit

MAX_DIFFERENCES = 8
"""Differences between two processes that a message lists."""
PACKAGES = ("jrl-reasoning", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
"""Packages that a run's values and files depend on."""
SOURCE_ROOT = Path(__file__).parents[2]
SOURCE_PACKAGES = ("jrl", "moe", "sharding")
HASH_LENGTH = 12


def is_multiprocess() -> bool:
    """True if the run has more than one process."""
    return jax.process_count() > 1


def is_main_process() -> bool:
    """True in process 0, which writes files and prints."""
    return jax.process_index() == 0


def connect(mesh: FoldedMesh) -> None:
    """Opens the connections of every group of devices along axes of `mesh`, by a sum of one number.

    Gloo gives a process 30 seconds to join a new group, and the processes of a run may differ by
    more while they compile their first functions. Here they join at the same time.
    """
    if not is_multiprocess():
        return
    any_of(False)  # a barrier: no process joins while another still compiles
    sharding = NamedSharding(mesh.mesh, PartitionSpec(mesh.axes))
    ones = to_devices(np.ones(mesh.layout.num_devices, np.float32), sharding)
    jax.block_until_ready(_compiled_group_sums(mesh)(ones))


@cache
def _compiled_group_sums(mesh: FoldedMesh) -> Callable[[jax.Array], jax.Array]:
    """Compiled function that sums over every group of devices."""
    axes = [axis for axis in mesh.axes if mesh.size((axis,)) > 1]
    groups = [group for n in range(len(axes)) for group in combinations(axes, n + 1)]

    def sum_over_groups(x: jax.Array) -> jax.Array:
        return sum((vary(all_sum(x, group), mesh.axes) for group in groups), x)

    local = jax.shard_map(
        sum_over_groups,
        mesh=mesh.mesh,
        in_specs=PartitionSpec(mesh.axes),
        out_specs=PartitionSpec(mesh.axes),
    )
    return DeviceJit(local)


def to_host(tree: Any) -> Any:
    """`jax.device_get` of full arrays, including arrays with shards on other processes.

    A process receives the shards that it does not have: ``itemsize x elements`` bytes at most for
    each array that is sharded over processes, none for the others.
    """

    def gather_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        with phase(AGREEMENT):
            return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(gather_leaf, tree))


def to_every_host(tree: Any, mesh: FoldedMesh) -> Any:
    """`to_host` of arrays over `mesh`, also in processes that have no device of it.

    The arrays of such processes have no values; they receive all of them, ``itemsize x elements``
    bytes each.
    """
    assert isinstance(mesh.mesh, jax.sharding.Mesh)
    owners = {device.process_index for device in mesh.mesh.devices.flat}
    if len(owners) == jax.process_count():
        return to_host(tree)
    leaves, structure = jax.tree.flatten(tree)
    process = jax.process_index()
    values = to_host(leaves) if process in owners else [np.zeros(x.shape, x.dtype) for x in leaves]
    # As bytes: they are added to the zeros of the others, and -0.0 + 0.0 is 0.0.
    content = np.concatenate([x.reshape(-1).view(np.uint8) for x in values])
    with phase(AGREEMENT):
        received = multihost_utils.broadcast_one_to_all(content, is_source=process == min(owners))
    boundaries = np.cumsum([x.nbytes for x in values])
    segments = np.split(np.asarray(received), boundaries[:-1])
    arrays = [
        np.array(p).view(x.dtype).reshape(x.shape) for p, x in zip(segments, values, strict=True)
    ]
    return structure.unflatten(arrays)


def to_devices(tree: Any, sharding: NamedSharding) -> Any:
    """`jax.device_put` of arrays on the host, or on this process's default device, equal in all
    processes; nothing is sent between them."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def make_array(leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: host[index], dtype=host.dtype
        )

    return jax.tree.map(make_array, tree)


def any_of(flag: bool) -> bool:
    """True if the flag is set in at least one process (all-reduce OR)."""
    if not is_multiprocess():
        return flag
    with phase(AGREEMENT):
        return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def broadcast_from_main(value: Any) -> Any:
    """Broadcasts the JSON-serializable value of process 0; values of other processes are
    ignored."""
    if not is_multiprocess():
        return value
    content = _encode(value if is_main_process() else None)
    with phase(AGREEMENT):
        size = int(multihost_utils.broadcast_one_to_all(np.asarray(content.size, np.int32)))
        received = multihost_utils.broadcast_one_to_all(_pad(content, size))
    return _decode(received, size)


def gather(value: Any) -> list[Any]:
    """All-gathers a JSON-serializable value: one value per process, in the order of their ids."""
    if not is_multiprocess():
        return [value]
    content = _encode(value)
    with phase(AGREEMENT):
        sizes = multihost_utils.process_allgather(np.asarray(content.size, np.int32))
        rows = multihost_utils.process_allgather(_pad(content, int(max(sizes))))
    return [_decode(row, int(size)) for row, size in zip(rows, sizes, strict=True)]


def check_same(
    settings: Mapping[str, Any],
    relation: str = "was started for another run than",
    remedy: str = "Start all processes with the same flags except --process-id.",
) -> None:
    """Checks that all processes have the same settings.

    Args:
      settings: JSON-serializable values that must be equal in all processes, by name.
      relation: a differing process's to process 0, for the message.
      remedy: what to do about it, for the message.

    Raises:
      ValueError: in all processes, with the differences to process 0.
    """
    first, *others = gather(dict(settings))
    for process, other in enumerate(others, start=1):
        differences = [
            f"{name} is {other.get(name)} there and {first.get(name)} in process 0"
            for name in sorted({*first, *other})
            if first.get(name) != other.get(name)
        ]
        if differences:
            hidden = differences[MAX_DIFFERENCES:]
            shown = [*differences[:MAX_DIFFERENCES], *([f"{len(hidden)} more"] if hidden else [])]
            raise ValueError(
                f"process {process} {relation} process 0: {'; '.join(shown)}. {remedy}"
            )


class RaiseInAllProcesses:
    """Context manager that raises in every process if its block raises in one, to avoid deadlocks.

    No collective may be called in the block: the process that failed would not take part.

    Raises:
      ValueError: where the block succeeded in this process and failed in another, with its message;
        and instead of an OSError of a file in this process, so that all processes end the same way.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not is_multiprocess():
            return
        messages = gather(None if error is None else str(error) or type(error).__name__)
        if isinstance(error, OSError) and error.filename is not None:
            raise ValueError(f"{error.filename}: {error.strerror}") from error
        if error is None:
            for process, message in enumerate(messages):
                if message is not None:
                    raise ValueError(f"process {process}: {message}")


def _encode(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _pad(content: np.ndarray, size: int) -> np.ndarray:
    """Pads to `size` bytes rounded up to a power of two, so that few variants are compiled."""
    padded = np.zeros(1 << (size - 1).bit_length(), np.uint8)
    padded[: content.size] = content[: padded.size]
    return padded


def _decode(padded: Any, size: int) -> Any:
    return json.loads(np.asarray(padded)[:size].tobytes())


def installed_versions() -> dict[str, str]:
    """Versions of `PACKAGES`; jrl itself may be imported from a checkout."""
    return {package: _installed_version(package) for package in PACKAGES}


def source_hashes() -> dict[str, str]:
    """Hashes of the library's Python files, by path, for example jrl/train.py."""
    paths = (path for name in SOURCE_PACKAGES for path in (SOURCE_ROOT / name).rglob("*.py"))
    return {
        path.relative_to(SOURCE_ROOT).as_posix(): short_hash(path.read_bytes())
        for path in sorted(paths)
    }


def short_hash(content: bytes) -> str:
    """First digits of a SHA-256, by which people tell two contents apart."""
    return sha256(content).hexdigest()[:HASH_LENGTH]


def check_same_software() -> None:
    """Raises ValueError, in all processes, with the differences to process 0, unless all run the
    same versions of `PACKAGES` and the same source files."""
    software, hashes = installed_versions(), source_hashes()
    # Files are compared one by one only if they differ: then each is named.
    if len(set(gather(sha256(json.dumps(hashes).encode()).hexdigest()))) > 1:
        software |= hashes
    check_same(
        software,
        "runs other software than",
        "Install the same version of jrl and of its packages on every machine.",
    )


def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
