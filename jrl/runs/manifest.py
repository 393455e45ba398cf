"""Manifest of a folder, ``manifest.json``: sizes and SHA-256 of the files written, and its own.

It is written last, so that a folder without one is incomplete. With multiple processes, each reads
the files that it wrote, a block at a time; every process must call all functions.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jrl.processes.agreement import broadcast_from_main, gather, is_main_process
from jrl.runs import records

NAME = "manifest.json"
THREADS = min(8, os.cpu_count() or 1)
"""Files read at once: hashing leaves the interpreter free."""


def write(folder: Path, step: int) -> None:
    """Writes the manifest of all files in the folder.

    Args:
      folder: what another writer of the same processes has completed.
      step: what the folder is of, so that one under the name of another step is noticed.
    """
    names = broadcast_from_main(_files(folder) if is_main_process() else None)
    parts = gather(dict(_each(_own(names), lambda name: _measure(folder / name))))
    if is_main_process():
        files = {name: found for part in parts for name, found in part.items()}
        content = {"step": step, "files": dict(sorted(files.items()))}
        content["sha256"] = _own_hash(content)
        records.replace(folder / NAME, json.dumps(content, indent=1).encode())
    gather(None)  # until it is there


def damage(folder: Path, step: int) -> str | None:
    """Reason why the folder is not as it was written; None if every byte is. Files that the
    manifest does not name are not checked."""
    files = broadcast_from_main(_read(folder, step) if is_main_process() else None)
    if isinstance(files, str):
        return files
    complaints = _each(_own(files), lambda name: _complaint(folder / name, files[name]))
    found = sorted(
        f"{name} {why}" for part in gather(dict(complaints)) for name, why in part.items() if why
    )
    if not found:
        return None
    more = f", and {len(found) - 1} more of its files are damaged" if len(found) > 1 else ""
    return found[0] + more


def _files(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if name != NAME]


def _own(names: Iterable[str]) -> list[str]:
    """The files that this process reads: those with its number in their path, as Orbax has it, and
    all without one in the first."""

    def owner(name: str) -> int:
        numbered = re.search(r"process_(\d+)", name)
        return int(numbered[1]) % jax.process_count() if numbered else 0

    return [name for name in names if owner(name) == jax.process_index()]


def _each(names: list[str], function: Any) -> Iterable[tuple[str, Any]]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(zip(names, pool.map(function, names), strict=True))


def _measure(path: Path) -> list[int | str]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def _read(folder: Path, step: int) -> dict[str, list[int | str]] | str:
    """Size and hash of each file as the manifest has them, or what is wrong with it."""
    try:
        content = json.loads((folder / NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return f"{NAME} is missing"
    except OSError as error:
        return f"{NAME} cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return f"{NAME} is not JSON"
    if not isinstance(content, dict) or content.pop("sha256", None) != _own_hash(content):
        return f"{NAME} has other content than was written"
    if content["step"] != step:
        return f"{NAME} is that of step {content['step']}"
    return content["files"]


def _own_hash(content: dict[str, Any]) -> str:
    """SHA-256 of the other fields of a manifest."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _complaint(path: Path, wanted: list[int | str]) -> str | None:
    try:
        if not path.is_file():
            return "is a directory" if path.is_dir() else "is missing"
        found = _measure(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found == wanted:
        return None
    if found[0] != wanted[0]:
        return f"has {found[0]} bytes instead of {wanted[0]}"
    return "has other content than was written"
