"""Checkpoints of one pytree, atomic and bit-exact, through Orbax.

A checkpoint is the folder ``<directory>/<step>/`` with three items: ``state`` (Orbax arrays under
flat names such as ``policy/layers/w``), ``tree`` (shape and dtype of every leaf, as JSON) and
``meta`` (the caller's own JSON), and with the hashes of all their files (`jrl.runs.manifest`),
which every reader verifies. It is written under a temporary name and renamed, so that a kill at any
moment leaves a complete checkpoint or none; leftovers are never read, and the next `save` removes
them. A checkpoint that is found damaged later can be set aside as ``<step>.damaged``.
"""

import atexit
import errno
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jrl.processes.agreement import RaiseInAllProcesses, broadcast_from_main, is_main_process
from jrl.runs import manifest

TEMPORARY = re.compile(r"\d+\.(writing.*|deleting)")
REMEDIES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space in the quota",
    errno.EMFILE: "raise the limit of open files (ulimit -n 4096)",
    errno.ENFILE: "close other programs, as the machine has no more files to open",
    errno.EROFS: "make the disk writable",
    errno.EACCES: "make the folder writable for this user",
    errno.EPERM: "make the folder writable for this user",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EIO: "check that disk",
}
"""Remedies of a user for errors of the operating system."""


class Checkpoints:
    """The checkpoints of one run.

    Every process of a multi-process program makes one of these and calls `save` and `restore`
    together. One run has one writer; other programs may restore meanwhile.

    Args:
      directory: of the checkpoints; created by the first `save`.
      keep: how many of the newest to keep, at least 1.
    """

    def __init__(self, directory: Path | str, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint to resume: give 1 or more")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._valid: set[int] = set()  # found so by this object
        self._had_parent = self.directory.parent.is_dir()
        self._orbax = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.PyTreeCheckpointHandler(),
                tree=ocp.JsonCheckpointHandler(),
                meta=ocp.JsonCheckpointHandler(),
            )
        )

    def steps(self) -> list[int]:
        """Return the steps of which a checkpoint was completed, oldest first: what the first
        process sees, in all of them."""
        return broadcast_from_main(self._steps() if is_main_process() else [])

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdigit())

    def latest_step(self) -> int | None:
        """Return the newest step of which a checkpoint was completed, or None."""
        return max(self.steps(), default=None)

    def latest_valid_step(self) -> tuple[int | None, dict[int, str]]:
        """Return the newest step whose checkpoint is as it was written, None where there is none at
        all, and what is damaged of the newer ones, by step. All files are read for that.

        Raises:
          ValueError: where there are checkpoints and all of them are damaged.
        """
        damaged: dict[int, str] = {}
        # A run that is being written may drop the one looked at: that is no damage.
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

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, which is not listed any more, and return its path.

        Only the writer of the run may call this.
        """
        path = self.directory / f"{step}.damaged"
        with RaiseInAllProcesses():
            if is_main_process():
                index = 2
                while path.exists():
                    path = self.directory / f"{step}.damaged-{index}"
                    index += 1
                (self.directory / str(step)).rename(path)
        return Path(broadcast_from_main(str(path)))

    def save(self, step: int, state: Any, meta: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint and return when it is on disk, then drop those beyond `keep`.

        Args:
          step: at least 0, and newer than every checkpoint there is.
          state: a pytree of jax arrays, typed PRNG keys and numpy arrays.
          meta: JSON values to come back with it.

        Raises:
          ValueError: for a step that is not newer, a leaf that is not an array, or a `meta` that
            JSON cannot hold.
          StorageError: where the file system refuses to hold it; the checkpoints before it stay.
        """
        latest = self.latest_step()
        if step < 0 or (latest is not None and step <= latest):
            raise ValueError(
                f"step={step} is not newer than the checkpoint of step {latest} in "
                f"{self.directory}: save later steps only, or call drop_after first"
            )
        leaves = _named_leaves(state)
        meta = {} if meta is None else dict(meta)
        try:
            json.dumps(meta, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"meta cannot be written as JSON: {error}") from None
        if self._had_parent and not self.directory.parent.is_dir():
            # Orbax would make it again, and half a run would be there.
            raise StorageError(
                f"{self.directory.parent} no longer exists: the checkpoint of step {step} cannot "
                "be written. Restore the folder, or start a run in another."
            )
        path = self.directory / f"{step}.writing"
        remaining = (
            "there is no earlier one" if latest is None else f"that of step {latest} stays intact"
        )
        with writing(
            self.directory, f"The checkpoint of step {step} was not written, {remaining}."
        ):
            self._remove_leftovers()
            self._orbax.save(
                path,
                args=ocp.args.Composite(
                    # Orbax refuses arrays without elements; their shape in `tree` says it all.
                    state=ocp.args.PyTreeSave(
                        {name: _raw(leaf) for name, leaf in leaves.items() if leaf.size}
                    ),
                    tree=ocp.args.JsonSave(
                        {name: _describe(leaf) for name, leaf in leaves.items()}
                    ),
                    meta=ocp.args.JsonSave(meta),
                ),
            )
            manifest.write(path, step)
            if is_main_process():
                path.rename(self.directory / str(step))
        self._delete(self.steps()[: -self.keep])

    def restore(self, step: int | None, like: Any, part: str = "") -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint.

        Args:
          step: which one, or None for the newest.
          like: a pytree of arrays or `jax.ShapeDtypeStruct`s of the same structure, shapes and
            dtypes. Each leaf is restored with the sharding of its counterpart (to the first device
            where that has none), and as a numpy array where that is one. The layout may differ from
            the one saved.
          part: what of the state to read, for example ``policy/weights``; `like` is then a tree of
            that part alone, or its one leaf, and nothing else is read.

        Returns:
          The state, equal bit for bit, and its `meta`.

        Raises:
          ValueError: where there is no such checkpoint, it is damaged, or it is one of another
            model; the message then lists every leaf that is missing, extra or differs.
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
        self._delete(later for later in self.steps() if later > step)

    def _find(self, step: int | None) -> tuple[int, dict[str, Any]]:
        """Return the requested step and the two JSON items of its checkpoint, which is valid."""
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
        """Reason why a checkpoint is not as it was written; None if it is."""
        reason = manifest.find_damage(self.directory / str(step), step)
        if reason is None:
            self._valid.add(step)
        return reason

    def _delete(self, steps: Iterable[int]) -> None:
        if not is_main_process():
            return
        for step in steps:
            # Renamed first: a kill while files go must not leave half a checkpoint under its name.
            doomed = self.directory / f"{step}.deleting"
            (self.directory / str(step)).rename(doomed)
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer left. Readers never call this: they could hit a live one."""
        if not is_main_process() or not self.directory.is_dir():
            return
        for entry in self.directory.iterdir():
            if TEMPORARY.fullmatch(entry.name):
                shutil.rmtree(entry)


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves under names such as ``policy/layers/w``, in the order of the tree."""
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


def _raw(leaf: Any) -> Any:
    """Return what Orbax stores: the words of a typed key, or the array itself."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _typed(array: Any, like: Any, description: Mapping[str, Any]) -> Any:
    """Undo `_raw`."""
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


def _check_same(path: Path, saved: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose leaves are not those wanted, naming all that differ."""

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


class StorageError(RuntimeError):
    """A file that the operating system did not let the run write."""


def errno_of(error: BaseException) -> int | None:
    """The number of the operating system's error that an exception, or what caused it, comes from:
    libraries in C++ have it in their text alone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in REMEDIES:
            return seen.errno
        text = str(seen)
        for code in REMEDIES:
            if re.search(rf"{re.escape(os.strerror(code))}|\b{errno.errorcode[code]}\b", text):
                return code
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Context in which `path` is written; a refused write raises an error of one line.

    Args:
      remedy: what is left, and how to continue.

    Raises:
      StorageError: where the operating system refused something.
    """
    # Threads of Orbax write each failure with its stack beside the exception.
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    try:
        yield
    except Exception as error:
        code = errno_of(error)
        if code is None:
            raise
        # What Orbax left half done complains once more when the interpreter ends.
        atexit.register(_silence_stderr)
        raise StorageError(f"{path}: {os.strerror(code)}: {REMEDIES[code]}. {remedy}") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        sys.unraisablehook = hook


def _silence_stderr() -> None:
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
