"""Control groups of the sandbox: one limit of memory and processes for all that code starts.

They are used if this process may create them: as root, in a container with a writable cgroup
file system, or below a systemd user session. Versions 1 and 2 are supported. Without them, the
sandbox has its resource limits, and `jrl.tasks.sandbox.init` adds up the usage of its processes.
"""

import contextlib
import errno
import itertools
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

PREFIX = "jrl-sandbox-"
JOIN = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs" || exit 125; shift; done; shift; '
"""Shell code that joins the groups given before ``--``."""
OVERHEAD = 16 * 2**20
"""Bytes for the two processes of the sandbox itself."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Group:
    """Control groups of one sandbox.

    Attributes:
      folders: one with version 2, one for each of memory and processes with version 1.
    """

    folders: tuple[Path, ...]

    @property
    def command(self) -> list[str]:
        """Command prefix that runs a command in the groups."""
        join = f'{JOIN}exec "$@"'
        return ["/bin/sh", "-c", join, "sh", *map(str, self.folders), "--"]

    def ran_out(self) -> bool:
        """True if the kernel has killed a process of the group for memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    match = re.search(r"^oom_kill (\d+)$", (folder / name).read_text(), re.M)
                    if match is not None and int(match[1]):
                        return True
        return False

    def remove(self) -> None:
        """Removes the groups, whose processes have ended."""
        for folder in self.folders:
            end = time.monotonic() + 1.0
            while _is_busy(folder) and time.monotonic() < end:
                time.sleep(0.001)


def _is_busy(folder: Path) -> bool:
    """True if a process of the group is still ending; otherwise the group is removed."""
    try:
        folder.rmdir()
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def create_group(memory: int, processes: int) -> Group | None:
    """Makes the groups of a sandbox; None if that is not possible.

    Args:
      memory: bytes.
      processes: number of processes and threads.
    """
    parents = _parents()
    return None if parents is None else _create_group(parents, memory, processes)


@cache
def _parents() -> tuple[Path, ...] | None:
    """Folders in which groups can be made; the result is cached."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    for parents in candidate_parents(mounts, membership):
        _remove_abandoned(parents)
        group = _create_group(parents, 2**26, 8)
        if group is None:
            continue
        try:
            joined = subprocess.run(
                [*group.command, "/bin/sh", "-c", ":"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:  # no shell
            return None
        finally:
            group.remove()
        if joined.returncode == 0:
            return parents
    return None


def candidate_parents(mounts: str, membership: str) -> list[tuple[Path, ...]]:
    """Folders that may have limits of memory and processes below them, best first.

    Args:
      mounts: content of /proc/self/mountinfo.
      membership: content of /proc/self/cgroup.
    """
    unified: list[tuple[str, Path]] = []
    controllers: dict[str, tuple[str, Path]] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        mount_entry = fields[3], Path(fields[4].replace("\\040", " "))
        if kind[0] == "cgroup2":
            unified.append(mount_entry)
        elif kind[0] == "cgroup":
            controllers |= {name: mount_entry for name in kind[2].split(",")}
    paths: dict[str, str] = {}
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        paths |= {name: path for name in names.split(",")}  # version 2 has the name ""
    folder_sets: list[tuple[Path, ...]] = []
    for mount_entry in unified:
        if "" in paths and (folder := _group_folder(mount_entry, paths[""])) is not None:
            mount = mount_entry[1]
            # A group with processes of its own cannot limit its children; its parent may.
            ancestors = [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
            folder_sets += [(each,) for each in ancestors]
    if all(name in controllers and name in paths for name in ("memory", "pids")):
        pair = [_group_folder(controllers[name], paths[name]) for name in ("memory", "pids")]
        folder_sets += (
            [tuple(each for each in pair if each is not None)] if None not in pair else []
        )
    return folder_sets


def _group_folder(mount_entry: tuple[str, Path], path: str) -> Path | None:
    """The folder of a group below a mount, which shows a subtree of the groups."""
    root, mount = mount_entry
    try:
        below = PurePosixPath(path).relative_to(root)
    except ValueError:
        return None
    return None if ".." in below.parts else mount / below


def _create_group(parents: tuple[Path, ...], memory: int, processes: int) -> Group | None:
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    group = Group(tuple(parent / name for parent in parents))
    bytes_, tasks = str(memory + OVERHEAD), str(processes + 4)
    try:
        for folder in group.folders:
            folder.mkdir()
        if len(parents) == 1:
            needed = {"memory.max": bytes_, "pids.max": tasks}
            _write(group.folders[0], needed, {"memory.swap.max": "0"})
        else:
            swap = {"memory.memsw.limit_in_bytes": bytes_}
            _write(group.folders[0], {"memory.limit_in_bytes": bytes_}, swap)
            _write(group.folders[1], {"pids.max": tasks}, {})
    except OSError:
        group.remove()
        return None
    return group


def _write(folder: Path, needed: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    for name, value in needed.items():
        (folder / name).write_text(value)
    for name, value in wanted.items():
        with contextlib.suppress(OSError):  # without swap
            (folder / name).write_text(value)


def _remove_abandoned(parents: tuple[Path, ...]) -> None:
    """Removes the groups of processes that were killed before removing them."""
    for parent in parents:
        for folder in parent.glob(f"{PREFIX}*"):
            pid = folder.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):  # not empty: the number is another container's
                    folder.rmdir()
