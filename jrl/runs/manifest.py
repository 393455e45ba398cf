"""Manifest of a folder, ``manifest.json``: sizes and SHA-256 of the files written, and its own.

It is written last, when all files are synced to disk: a folder that lacks it is incomplete, and a
folder that has it survives a loss of power. With multiple processes, each reads the files that it
wrote, a block at a time; every process must call all functions.

In Google Cloud Storage the hashes are the storage's own checksums (CRC32C) of its objects, so that
no file is read.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jrl.processes import agreement
from jrl.processes.agreement import broadcast_from_main, is_main_process
from jrl.processes.progress import heartbeat
from jrl.runs import records
from jrl.runs.directory import MANIFEST_NAME, StoragePath, checksums, is_bucket

THREADS = min(8, os.cpu_count() or 1)
"""Number of files read concurrently; hashing releases the interpreter lock."""


def write(
    folder: StoragePath, step: int, gather: Callable[[Any], list[Any]] = agreement.gather
) -> None:
    """Writes the manifest of all files in the folder.

    Args:
      folder: complete folder, written by the same processes.
      step: step of the checkpoint, to detect a folder under the name of another step.
      gather: all-gather of JSON values; in a background thread, one that uses no device.
    """
    if not is_bucket(folder):
        _write_synced(Path(folder), step, gather)
    elif is_main_process():
        (folder / MANIFEST_NAME).write_bytes(_content(step, checksums(folder)))
    gather(None)  # waits until it is written


def _write_synced(folder: Path, step: int, gather: Callable[[Any], list[Any]]) -> None:
    def sync_and_hash(name: str) -> list[int | str]:
        path = folder / name
        # Orbax does not sync all of its files.
        with records.naming(path), path.open("rb") as file:
            os.fsync(file.fileno())
        return _size_and_hash(path)

    names = gather(_files(folder) if is_main_process() else None)[0]
    manifests = gather(_map_local_files(names, sync_and_hash))
    if is_main_process():
        files = {name: entry for manifest in manifests for name, entry in manifest.items()}
        records.replace(folder / MANIFEST_NAME, _content(step, files))
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            records.sync_folder(path)


def _content(step: int, files: Mapping[str, list[int | str]]) -> bytes:
    content = {"step": step, "files": dict(sorted(files.items()))}
    content["sha256"] = _content_hash(content)
    return json.dumps(content, indent=1).encode()


def find_damage(folder: StoragePath, step: int) -> str | None:
    """Reason why the folder is damaged; None if every byte is intact. Files that are not in the
    manifest are not checked."""
    if is_bucket(folder):
        return broadcast_from_main(find_incomplete(folder, step) if is_main_process() else None)
    files = broadcast_from_main(_read(folder, step) if is_main_process() else None)
    if isinstance(files, str):
        return files
    damage_of_files = _map_local_files(
        files, lambda name: _file_damage(Path(folder) / name, files[name])
    )
    damaged = sorted(
        f"{name} {reason}"
        for damages in agreement.gather(damage_of_files)
        for name, reason in damages.items()
        if reason
    )
    if not damaged:
        return None
    more = f", and {len(damaged) - 1} more of its files are damaged" if len(damaged) > 1 else ""
    return damaged[0] + more


def find_incomplete(folder: StoragePath, step: int) -> str | None:
    """Reason why files are missing or have wrong sizes; None if all are complete.

    Only the manifest is read. For the first of several processes.
    """
    files = _read(folder, step)
    if isinstance(files, str):
        return files
    if is_bucket(folder):
        objects = checksums(folder)
        reasons = ((name, _object_damage(objects.get(name), files[name])) for name in files)
    else:
        reasons = ((name, _size_damage(Path(folder) / name, files[name][0])) for name in files)
    return next((f"{name} {reason}" for name, reason in reasons if reason), None)


def _files(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in paths if path != folder / MANIFEST_NAME]


def _map_local_files(names: Iterable[str], function: Callable[[str], Any]) -> dict[str, Any]:
    """Results of a function of the files that this process reads: files with its index in their
    path, as Orbax writes it, and in the first process also all files with no index."""

    def owner(name: str) -> int:
        numbered = re.search(r"process_(\d+)", name)
        return int(numbered[1]) % jax.process_count() if numbered else 0

    local = [name for name in names if owner(name) == jax.process_index()]
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(local, pool.map(function, local), strict=True))


def _size_and_hash(path: Path) -> list[int | str]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        heartbeat()  # all files of a large checkpoint take longer than a phase is allowed
        return [file.tell(), digest]


def _read(folder: StoragePath, step: int) -> dict[str, list[int | str]] | str:
    """Size and hash of each file in the manifest, or the defect of the manifest."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return f"{MANIFEST_NAME} is missing"
    except OSError as error:
        return f"{MANIFEST_NAME} cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return f"{MANIFEST_NAME} is not JSON"
    if not isinstance(content, dict) or content.pop("sha256", None) != _content_hash(content):
        return f"{MANIFEST_NAME} has other content than was written"
    if content["step"] != step:
        return f"{MANIFEST_NAME} is that of step {content['step']}"
    return content["files"]


def _content_hash(content: dict[str, Any]) -> str:
    """SHA-256 of the other fields of a manifest."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _file_damage(path: Path, expected: list[int | str]) -> str | None:
    try:
        reason = _size_damage(path, expected[0])
        if reason is not None or _size_and_hash(path) == expected:
            return reason
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "has other content than was written"


def _object_damage(entry: list[int | str] | None, expected: list[int | str]) -> str | None:
    if entry is None:
        return "is missing"
    if entry[0] != expected[0]:
        return f"has {entry[0]} bytes instead of {expected[0]}"
    return None if entry == expected else "has other content than was written"


def _size_damage(path: Path, expected: int | str) -> str | None:
    if not path.is_file():
        return "is a directory" if path.is_dir() else "is missing"
    size = path.stat().st_size
    return None if size == expected else f"has {size} bytes instead of {expected}"
