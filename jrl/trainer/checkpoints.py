"""Checkpoints of one pytree, atomic and bit-exact, through Orbax.

A checkpoint is the folder ``<directory>/<step>/`` with three items: ``state`` (Orbax arrays under
flat names such as ``policy/layers/w``), ``tree`` (shape and dtype of every leaf, as JSON) and
``meta`` (the caller's own JSON). Orbax writes it under a temporary name and renames it, so that a
kill at any moment leaves a whole checkpoint or none; leftovers are never read, and the next `save`
removes them.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jrl.trainer.processes import from_first, is_first

TEMPORARY = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleting)")


class Checkpoints:
    """The checkpoints of one run.

    Every process of a multi-process program makes one of these and calls `save` and `restore`
    together. One run has one writer; other programs may restore meanwhile.

    Args:
      directory: where checkpoints lie; made by the first `save`.
      keep: how many of the newest to keep, at least 1.
    """

    def __init__(self, directory: Path | str, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint to resume: give 1 or more")
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._orbax = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.PyTreeCheckpointHandler(),
                tree=ocp.JsonCheckpointHandler(),
                meta=ocp.JsonCheckpointHandler(),
            )
        )

    def steps(self) -> list[int]:
        """Return the steps of which there is a whole checkpoint, oldest first: what the first
        process sees, in all of them."""
        return from_first(self._steps() if is_first() else [])

    def _steps(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if entry.name.isdigit())

    def latest_step(self) -> int | None:
        """Return the newest step of which there is a whole checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint and return when it is on disk, then drop those beyond `keep`.

        Args:
          step: at least 0, and newer than every checkpoint there is.
          state: a pytree of jax arrays, typed PRNG keys and numpy arrays.
          meta: JSON values to come back with it.

        Raises:
          ValueError: for a step that is not newer, a leaf that is not an array, or a `meta` that
            JSON cannot hold.
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
        self._remove_leftovers()
        self._orbax.save(
            self.directory / str(step),
            args=ocp.args.Composite(
                # Orbax refuses arrays without elements; their shape in `tree` says it all.
                state=ocp.args.PyTreeSave(
                    {name: _raw(leaf) for name, leaf in leaves.items() if leaf.size}
                ),
                tree=ocp.args.JsonSave({name: _describe(leaf) for name, leaf in leaves.items()}),
                meta=ocp.args.JsonSave(meta),
            ),
        )
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
            that part alone, and nothing else is read.

        Returns:
          The state, equal bit for bit, and its `meta`.

        Raises:
          ValueError: where there is no such checkpoint, or it is one of another model; the message
            lists every leaf that is missing, extra or differs.
        """
        step, found = self._find(step)
        prefix = f"{part}/" if part else ""
        wanted = {prefix + name: leaf for name, leaf in _named_leaves(like).items()}
        there = {n: leaf for n, leaf in found["tree"].items() if n.startswith(prefix)}
        path = self.directory / str(step)
        _check_same(path, there, {n: _describe(leaf) for n, leaf in wanted.items()})
        stored = {name: leaf for name, leaf in wanted.items() if leaf.size}
        arrays = self._orbax.restore(
            path,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(
                    item={name: 0 for name in stored},
                    restore_args={name: _restore_args(leaf) for name, leaf in stored.items()},
                    partial_restore=bool(part),
                )
            ),
        )["state"]
        state = [
            _typed(arrays[name], leaf, found["tree"][name]) if leaf.size else _empty(leaf)
            for name, leaf in wanted.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(like), state), found["meta"]

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """Return the `meta` of one checkpoint (None: the newest) without reading its arrays."""
        return self._find(step)[1]["meta"]

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints newer than `step`, to train on from an older one."""
        self._delete(later for later in self.steps() if later > step)

    def _find(self, step: int | None) -> tuple[int, dict[str, Any]]:
        """Return the step asked for and the two JSON items of its checkpoint."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise ValueError(f"{wanted} in {self.directory}: {there}")
        step = steps[-1] if step is None else step
        found = self._orbax.restore(
            self.directory / str(step),
            args=ocp.args.Composite(tree=ocp.args.JsonRestore(), meta=ocp.args.JsonRestore()),
        )
        return step, {"tree": found["tree"], "meta": found["meta"]}

    def _delete(self, steps: Iterable[int]) -> None:
        if not is_first():
            return
        for step in steps:
            # Renamed first: a kill while files go must not leave half a checkpoint under its name.
            doomed = self.directory / f"{step}.deleting"
            (self.directory / str(step)).rename(doomed)
            shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer left. Readers never call this: they could hit a live one."""
        if not is_first() or not self.directory.is_dir():
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


def _check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose leaves are not those wanted, naming all that differ."""

    def text(description: Mapping[str, Any]) -> str:
        return f"{description['dtype']}[{','.join(map(str, description['shape']))}]"

    differences = [f"missing {name}" for name in wanted if name not in found]
    differences += [f"extra {name}" for name in found if name not in wanted]
    differences += [
        f"{name} is {text(found[name])}, not {text(wanted[name])}"
        for name in wanted
        if name in found and text(found[name]) != text(wanted[name])
    ]
    if differences:
        raise ValueError(
            f"checkpoint {path} is of another model: {'; '.join(differences)}; "
            "use the configuration it was saved with"
        )
