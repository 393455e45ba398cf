"""Checkpoints of one pytree, atomic and bit-exact, through Orbax.

A checkpoint is the folder ``<directory>/<step>/`` with three items: ``state`` (Orbax arrays under
flat names, for example ``policy/layers/w``), ``tree`` (shape and dtype of every leaf, as JSON) and
``meta`` (the caller's own JSON), and with the hashes of all their files (`jrl.runs.manifest`),
which every reader verifies. A kill at any moment leaves a complete checkpoint or none
(`jrl.runs.directory`); leftovers are never read, and the next `save` removes them. A checkpoint
that is found damaged later can be set aside as ``<step>.damaged``.
"""

import json
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jrl.processes.agreement import (
    RaiseInAllProcesses,
    any_of,
    broadcast_from_main,
    is_main_process,
    is_multiprocess,
)
from jrl.processes.allocator import return_free_memory
from jrl.processes.coordinator import BackgroundGather
from jrl.runs import manifest
from jrl.runs.directory import StoragePath, is_bucket, open_directory
from jrl.runs.storage import BackgroundSave, StorageError, quiet, writing

BASE = "base"
"""Folder of the base weights of a run with adapters: a checkpoint of step 0 beside the others."""
CHUNK_BYTES = 2**26
"""Chunk size of host arrays in bytes, as readers on meshes need parts of them."""
CHUNK_FACTOR = 16
"""Arrays are stored in chunks if every axis is shorter than this or a multiple of it: Orbax chooses
divisors as chunk sizes, and a prime axis would give millions of chunks."""
NO_TIMEOUT = 10**6
"""Timeout of Orbax in seconds, practically none: the watchdog ends a write that hangs."""
_saves = count()
"""Number of saves of this program, which all processes make in the same order."""


class CheckpointSchedule:
    """Decides after each step whether a checkpoint is due, the same in all processes.

    Args:
      every: steps between two checkpoints.
      minutes: minutes since the last one after which a step ends with a checkpoint; None is any.
      clock: seconds; of the first process, which decides.
    """

    def __init__(
        self, every: int, minutes: float | None, clock: Callable[[], float] = time.monotonic
    ):
        self._every, self._minutes, self._clock = every, minutes, clock
        self._saved_at = clock()

    def is_due(self, step: int) -> bool:
        """True if `step` ends with a checkpoint; a collective."""
        if step % self._every == 0:
            return True
        if self._minutes is None:
            return False
        seconds = self._clock() - self._saved_at
        return any_of(is_main_process() and seconds >= 60.0 * self._minutes)

    def saved(self) -> None:
        """Starts the minutes again."""
        self._saved_at = self._clock()


class Checkpoints:
    """The checkpoints of one run.

    Every process of a multi-process program makes one of these and calls `save`, `wait` and
    `restore` together. One run has one writer; other programs may restore at the same time.

    `save` returns before the checkpoint is on disk: call `wait` or `close` before the program ends,
    or use a ``with`` block. At most one checkpoint is written at a time.

    Args:
      directory: of the checkpoints, a path or an address ``gs://BUCKET/PATH``; created by the first
        `save`.
      keep: number of newest checkpoints to keep, at least 1.
    """

    def __init__(self, directory: StoragePath | str, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint to resume: give 1 or more")
        self._directory = open_directory(directory)
        self.directory = self._directory.path
        self.keep = keep
        self._valid: set[int] = set()  # verified by this object
        self._had_parent = not is_bucket(self.directory) and self.directory.parent.is_dir()
        self._in_flight: BackgroundSave | None = None
        self._silence = ExitStack()
        self._last_gather: BackgroundGather | None = None
        self._orbax = ocp.Checkpointer(_handler(ocp.PyTreeCheckpointHandler()))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
            return
        if self._in_flight is not None:
            self._in_flight.abandon()
        try:
            self.close()
        except Exception as reason:  # the block's own error takes precedence
            print(f"warning: the last checkpoint was not completed: {reason}", file=sys.stderr)

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first: in all processes those that the
        first process sees."""
        return broadcast_from_main(self._directory.steps() if is_main_process() else [])

    def latest_step(self) -> int | None:
        """Return the newest step with a complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def latest_valid_step(self) -> tuple[int | None, dict[int, str]]:
        """Return the newest step whose checkpoint is undamaged, or None if there is no checkpoint,
        and the damage of newer ones, by step; ValueError if all are damaged. All files are read for
        verification."""
        damaged: dict[int, str] = {}
        # A run in progress may remove the checkpoint being verified: this is no damage.
        while steps := [step for step in self.steps() if step not in damaged]:
            step = steps[-1]
            reason = self._damage(step)
            if reason is None:
                return step, {later: damaged[later] for later in damaged if later > step}
            if step in self.steps():
                damaged[step] = reason
        if damaged:
            listed = "; ".join(f"of step {step}: {reason}" for step, reason in damaged.items())
            raise ValueError(
                f"no checkpoint in {self.directory} is intact ({listed}): restore a copy of one, "
                "or start a new run in another folder"
            )
        return None, {}

    def identity(self, step: int) -> Hashable:
        """Identity of a checkpoint, which changes if it is replaced; None if there is none."""
        return self._directory.identity(step)

    def set_aside(self, step: int) -> StoragePath:
        """Rename a damaged checkpoint, so that it is not listed any more, and return its path. Only
        the writer of the run may call this."""
        self.wait()
        name = ""
        with RaiseInAllProcesses():
            if is_main_process():
                name = self._directory.set_aside(step).name
        return self.directory / broadcast_from_main(name)

    def save(
        self,
        step: int,
        state: Any,
        meta: Mapping[str, Any] | None = None,
        *,
        copy_arrays: bool = True,
    ) -> None:
        """Copy the state to the host and return; a thread then writes the checkpoint, and removes
        the oldest beyond `keep`.

        The checkpoint contains the state at the call: its buffers may be donated or overwritten
        immediately after. The host needs memory for one copy of it. A save that is still in flight
        is waited for first.

        Args:
          step: at least 0, and newer than every existing checkpoint.
          state: a pytree of jax arrays, typed PRNG keys and numpy arrays.
          meta: JSON values to store with it.
          copy_arrays: false for a state that stays as it is until `wait` returns: arrays of a CPU
            are then written from their own memory.

        Raises:
          ValueError: for a step that is not newer, a leaf that is not an array, or a `meta` that
            JSON cannot represent.
          StorageError: if the file system cannot store it, or could not store the previous one;
            earlier checkpoints remain.
        """
        self.wait()
        latest = self.latest_step()
        if self._last_gather is not None:
            self._last_gather.clear()  # all processes have passed a collective since
        self._check_step(step, latest)
        leaves, meta = _named_leaves(state), _json_copy({} if meta is None else dict(meta))
        remaining = (
            "there is no earlier one" if latest is None else f"that of step {latest} stays intact"
        )
        remedy = f"The checkpoint of step {step} was not written, {remaining}."
        self._last_gather = gather = BackgroundGather(f"checkpoint/{next(_saves)}")
        with ExitStack() as stack:
            stack.enter_context(quiet)
            with writing(self.directory, remedy):
                if is_main_process():
                    self._directory.remove_leftovers()
                write = self._copy(step, leaves, meta, gather, copy_arrays)
            silence = self._silence = stack.pop_all()

        def complete() -> None:
            with writing(self.directory, remedy):
                write()
                self._publish(step, gather)
            return_free_memory()  # what Orbax compressed, in small blocks
            silence.close()
            if is_main_process():
                self._delete(self._directory.steps()[: -self.keep])

        self._in_flight = BackgroundSave(complete, gather)

    def wait(self) -> None:
        """Wait until the checkpoint in flight is complete; StorageError if the file system could
        not store it, with the earlier checkpoints unchanged."""
        if self._in_flight is None:
            return
        try:
            self._in_flight.wait()
        except Exception:
            self._in_flight = None
            self._silence.close()  # failures have been reported from here on
            raise
        self._in_flight = None

    def close(self) -> None:
        """`wait`, at the end of a run."""
        self.wait()

    def _check_step(self, step: int, latest: int | None) -> None:
        if step < 0 or (latest is not None and step <= latest):
            raise ValueError(
                f"step={step} is not newer than the checkpoint of step {latest} in "
                f"{self.directory}: save later steps only, or call drop_after first"
            )
        if self._had_parent and not self.directory.parent.is_dir():
            # Orbax would create it again, with a part of the run only.
            raise StorageError(
                f"{self.directory.parent} no longer exists: the checkpoint of step {step} cannot "
                "be written. Restore the folder, or start a run in another."
            )

    def _copy(
        self,
        step: int,
        leaves: Mapping[str, Any],
        meta: Any,
        gather: BackgroundGather,
        copy_arrays: bool,
    ) -> Callable[[], None]:
        """Copies the arrays to the host, and returns the function that writes them in a thread."""
        # Orbax rejects arrays without elements; their shape in `tree` suffices.
        arrays = {name: _on_host(leaf, copy_arrays) for name, leaf in _transfers(leaves).items()}
        path = self._directory.destination(step)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(
                arrays, {name: _save_args(array) for name, array in arrays.items()}
            ),
            tree=ocp.args.JsonSave({name: _describe(leaf) for name, leaf in leaves.items()}),
            meta=ocp.args.JsonSave(meta),
        )
        if not is_multiprocess():
            return partial(_write_host_arrays, path, items)
        # Orbax copies the shards that this process writes before `save` returns.
        writer = _writer_of_shards(gather)
        writer.save(path, args=items)
        return writer.close

    def _publish(self, step: int, gather: BackgroundGather) -> None:
        """Writes the hashes of a completed checkpoint and gives it its final name."""
        manifest.write(self._directory.destination(step), step, gather)
        if is_main_process():
            self._directory.publish(step)
        gather(None)  # waits until it is published

    def restore(self, step: int | None, like: Any, part: str = "") -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint.

        Args:
          step: step of the checkpoint, or None for the newest.
          like: a pytree of arrays or `jax.ShapeDtypeStruct`s of the same structure, shapes and
            dtypes. Each leaf is restored with the sharding of its counterpart (on the first device
            if that has none), and as a numpy array if that is one. The layout may differ from the
            one saved.
          part: subtree of the state to read, for example ``policy/weights``; `like` is then a tree
            of that part, or its one leaf, and nothing else is read.

        Returns:
          The state, bitwise identical, and its `meta`.

        Raises:
          ValueError: if there is no such checkpoint, it is damaged, or it is of another model; the
            message then lists every leaf that is missing, extra or different.
        """
        step, items = self._find(step)
        named = _named_leaves(like).items()
        requested = {"/".join(filter(None, (part, name))): leaf for name, leaf in named}
        prefix = f"{part}/" if part else ""
        saved_leaves = {n: leaf for n, leaf in items["tree"].items() if f"{n}/".startswith(prefix)}
        path = self.directory / str(step)
        _check_same(path, saved_leaves, {n: _describe(leaf) for n, leaf in requested.items()})
        nonempty = {name: leaf for name, leaf in requested.items() if leaf.size}
        arrays = self._orbax.restore(
            path,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(
                    item={name: 0 for name in nonempty},
                    restore_args={name: _restore_args(leaf) for name, leaf in nonempty.items()},
                    partial_restore=bool(part),
                )
            ),
        )["state"]
        state = [
            _typed(arrays[name], leaf, items["tree"][name]) if leaf.size else _empty(leaf)
            for name, leaf in requested.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(like), state), items["meta"]

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """Return the `meta` of one checkpoint (None: the newest) without its arrays."""
        return self._find(step)[1]["meta"]

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints newer than `step`, to train on from an older one."""
        self.wait()
        self.drop(later for later in self.steps() if later > step)

    def drop(self, steps: Iterable[int]) -> None:
        """Remove the checkpoints of these steps."""
        self.wait()
        self._delete(steps)

    def _find(self, step: int | None) -> tuple[int, dict[str, Any]]:
        """Return the requested step and the two JSON items of its valid checkpoint."""
        self.wait()
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            missing_text = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            available_text = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise ValueError(f"{missing_text} in {self.directory}: {available_text}")
        step = steps[-1] if step is None else step
        if step not in self._valid and (reason := self._damage(step)) is not None:
            raise ValueError(
                f"checkpoint {self.directory / str(step)} is damaged: {reason}; restore a copy of "
                "it, or use an older one"
            )
        items = self._orbax.restore(
            self.directory / str(step),
            args=ocp.args.Composite(tree=ocp.args.JsonRestore(), meta=ocp.args.JsonRestore()),
        )
        return step, {"tree": items["tree"], "meta": items["meta"]}

    def _damage(self, step: int) -> str | None:
        """Reason why a checkpoint is damaged; None if it is not."""
        reason = manifest.find_damage(self.directory / str(step), step)
        if reason is None:
            self._valid.add(step)
        return reason

    def _delete(self, steps: Iterable[int]) -> None:
        if is_main_process():
            for step in steps:
                self._directory.delete(step)


def _handler(
    state: ocp.PyTreeCheckpointHandler, options: ocp.options.AsyncOptions | None = None
) -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(
        state=state,
        tree=ocp.JsonCheckpointHandler(),
        meta=ocp.JsonCheckpointHandler(),
        composite_options=ocp.CompositeOptions(async_options=options),
    )


def _write_host_arrays(path: StoragePath, items: ocp.args.Composite) -> None:
    """Writes NumPy arrays, in any thread of a run of one process."""
    # Orbax would copy them once more by default.
    handler = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, handler))
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(_handler(state)) as writer:
        writer.save(path, args=items)


def _writer_of_shards(gather: BackgroundGather) -> ocp.AsyncCheckpointer:
    """Writer for multi-process runs, in which each process writes its shards in Orbax's threads."""

    def barrier(*, key: str, timeout_ms: int) -> None:
        gather(None)  # unlike Orbax's own, it ends if another process fails

    options = ocp.options.AsyncOptions(
        timeout_secs=NO_TIMEOUT, barrier_sync_fn=barrier, create_directories_asynchronously=False
    )
    handler = _handler(ocp.PyTreeCheckpointHandler(), options)
    return ocp.AsyncCheckpointer(handler, async_options=options)


def _json_copy(meta: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta cannot be written as JSON: {error}") from None


def _transfers(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays with elements in the form that Orbax stores (for a typed key, its words); their copies
    to the host are started together."""
    arrays = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in leaves.items()
        if leaf.size
    }
    for array in arrays.values():
        if isinstance(array, jax.Array) and not is_multiprocess():
            array.copy_to_host_async()
    return arrays


def _on_host(array: Any, copy_arrays: bool) -> Any:
    """An array on the host, which may be a view if it need not be a copy; arrays over several
    processes are copied by Orbax."""
    if isinstance(array, jax.Array) and is_multiprocess():
        return array
    host = np.asarray(array)
    # A view shares memory that may be overwritten, of a CPU device or of the caller.
    owns_memory = host.flags.owndata and isinstance(array, jax.Array)
    return host if owns_memory or not copy_arrays else host.copy()


def _save_args(array: Any) -> ocp.SaveArgs:
    is_divisible = all(size < CHUNK_FACTOR or size % CHUNK_FACTOR == 0 for size in array.shape)
    if isinstance(array, np.ndarray) and is_divisible:
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.SaveArgs()  # as one chunk, or by shards


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves by name, for example ``policy/layers/w``, in the order of the tree."""
    leaves = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise ValueError(
                f'leaf "{name}" is {leaf!r} of type {type(leaf).__name__}: '
                "a checkpoint holds arrays; wrap it in numpy.asarray, or put it into meta"
            )
        if name in leaves:
            raise ValueError(f'two leaves have the name "{name}": rename one of the dict keys')
        leaves[name] = leaf
    return leaves


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _typed(array: Any, like: Any, description: Mapping[str, Any]) -> Any:
    """Restore the type of an array that Orbax has stored."""
    return jax.random.wrap_key_data(array, impl=description["impl"]) if _is_key(like) else array


def _describe(leaf: Any) -> dict[str, Any]:
    description = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if _is_key(leaf) and isinstance(leaf, jax.Array):
        description["impl"] = str(jax.random.key_impl(leaf))
    return description


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, np.ndarray):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=_sharding(leaf))


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    if leaf.sharding is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return leaf.sharding


def _empty(leaf: Any) -> Any:
    """Return an array without elements."""
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return jax.device_put(jax.numpy.empty(leaf.shape, leaf.dtype), _sharding(leaf))


def _check_same(path: StoragePath, saved: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Reject a checkpoint whose leaves differ from those requested, naming all of them."""

    def text(description: Mapping[str, Any]) -> str:
        return f"{description['dtype']}[{','.join(map(str, description['shape']))}]"

    differences = [f"missing {name}" for name in requested if name not in saved]
    differences += [f"extra {name}" for name in saved if name not in requested]
    differences += [
        f"{name} is {text(saved[name])}, not {text(requested[name])}"
        for name in requested
        if name in saved and text(saved[name]) != text(requested[name])
    ]
    if differences:
        raise ValueError(
            f"checkpoint {path} is of another model: {'; '.join(differences)}; "
            "use the configuration, and the version of jrl, that it was saved with"
        )
