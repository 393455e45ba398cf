"""Directory of a run's checkpoints: on a file system, or in Google Cloud Storage.

Renaming a folder is atomic in a file system, so a checkpoint there is written under a temporary
name. Object storage would copy every object: there it is written under its own name, and is
complete once its last object, the manifest, exists.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Hashable, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from etils import epath

from jrl.checks import import_extra
from jrl.runs import records

MANIFEST_NAME = "manifest.json"
TEMPORARY = re.compile(r"\d+\.(writing.*|deleting)")
OBJECT_STORAGE = re.compile(r"(gs|s3|az|abfss?|hdfs|https?)://?(?P<rest>.*)")
"""Prefixes of addresses that are not paths; `pathlib.Path` drops one of two slashes."""
LONGEST_ERROR = 400
"""Maximum characters of an error message of Google Cloud Storage, whose bodies can be pages."""

StoragePath = Path | epath.Path
"""A path of a file system, or an address in Google Cloud Storage, with the same methods."""


def storage_path(address: StoragePath | str) -> StoragePath:
    """The absolute path, or the ``gs://`` address, of a text; ValueError for addresses of other
    storage, and for one that names no bucket."""
    matched = OBJECT_STORAGE.fullmatch(str(address))
    if matched is None:
        return Path(os.path.expanduser(address)).absolute()
    if matched[1] != "gs":
        raise ValueError(
            f"{address} is an address of storage that Orbax does not write: give gs://BUCKET/PATH, "
            "or a path of a file system"
        )
    parts = [part for part in matched["rest"].split("/") if part]
    if len(parts) < 2:
        raise ValueError(f"{address} names no folder in a bucket: give gs://BUCKET/PATH")
    return epath.Path("gs://" + "/".join(parts))


def is_bucket(path: StoragePath) -> bool:
    """True for an address in Google Cloud Storage."""
    return str(path).startswith("gs://")


class Directory:
    """Checkpoints of a run by step, as read and changed by the first of several processes.

    On a file system; `BucketDirectory` overrides the differences of object storage.
    """

    def __init__(self, path: StoragePath):
        self.path = path

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, ascending."""
        return sorted(int(entry.name) for entry in self._entries() if entry.name.isdigit())

    def is_empty(self) -> bool:
        """True if there is no checkpoint, complete, incomplete or damaged."""
        return not (self.steps() or self.incomplete() or self.damaged())

    def destination(self, step: int) -> StoragePath:
        """Path at which the checkpoint of a step is written."""
        return self.path / f"{step}.writing"

    def publish(self, step: int) -> None:
        """Completes the checkpoint, with its manifest, at its destination."""
        self.destination(step).rename(self.path / str(step))
        records.sync_folder(Path(self.path))  # before older checkpoints are deleted

    def delete(self, step: int) -> None:
        """Removes a complete checkpoint; after a kill meanwhile, it is no longer under its name."""
        doomed = self.path / f"{step}.deleting"
        (self.path / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def identity(self, step: int) -> Hashable:
        """Identity of a complete checkpoint; None if there is none."""
        try:
            status = Path(self.path / str(step)).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def set_aside(self, step: int) -> StoragePath:
        """Renames a damaged checkpoint to a free name, and returns that."""
        path = _free_name(self.path / f"{step}.damaged")
        (self.path / str(step)).rename(path)
        return path

    def incomplete(self) -> list[StoragePath]:
        """Checkpoints that were left by a killed writer, or are being written."""
        return [entry for entry in self._entries() if TEMPORARY.fullmatch(entry.name)]

    def damaged(self) -> list[StoragePath]:
        """Checkpoints that were set aside."""
        return [path for path in self._entries() if ".damaged" in path.name]

    def remove_leftovers(self) -> None:
        """Removes the results of `incomplete`. Only for the writer: others could hit a live one."""
        for entry in self.incomplete():
            shutil.rmtree(entry)

    def claim(self, config: bytes) -> None:
        """Creates a directory outside of the run folder, with a copy of the run's configuration for
        those who find only the checkpoints."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_bytes(config)

    def size_and_time(self, folder: StoragePath) -> tuple[int, float]:
        """Bytes in a folder, and the time of its last write, in seconds since 1970."""
        files = [entry for entry in Path(folder).rglob("*") if entry.is_file()]
        return sum(entry.stat().st_size for entry in files), Path(folder).stat().st_mtime

    def _entries(self) -> list[StoragePath]:
        """All entries of the directory, by name."""
        return sorted(self.path.iterdir()) if self.path.is_dir() else []


def open_directory(path: StoragePath | str) -> Directory:
    """The directory at a path of a file system, or at a ``gs://`` address; ValueError for other
    addresses, and for ``gs://`` without gcsfs."""
    path = storage_path(path)
    return BucketDirectory(path) if is_bucket(path) else Directory(path)


class BucketDirectory(Directory):
    """Directory in Google Cloud Storage."""

    def __init__(self, path: StoragePath):
        super().__init__(path)
        bucket_files()

    def steps(self) -> list[int]:
        return sorted(int(path.name) for path in self._checkpoints(complete=True))

    def destination(self, step: int) -> StoragePath:
        return self.path / str(step)

    def publish(self, step: int) -> None:
        pass  # complete: the manifest is written last

    def delete(self, step: int) -> None:
        (self.path / str(step) / MANIFEST_NAME).unlink(missing_ok=True)
        bucket_files().rm(str(self.path / str(step)), recursive=True)

    def identity(self, step: int) -> Hashable:
        try:
            return bucket_files().info(str(self.path / str(step) / MANIFEST_NAME))["generation"]
        except OSError:
            return None

    def set_aside(self, step: int) -> StoragePath:
        path = _free_name(self.path / f"{step}.damaged")
        # Not `mv`, which repeatedly tries operations that buckets without folders reject.
        bucket_files().copy(str(self.path / str(step)), str(path), recursive=True)
        self.delete(step)
        return path

    def incomplete(self) -> list[StoragePath]:
        return self._checkpoints(complete=False)

    def remove_leftovers(self) -> None:
        for path in self.incomplete():
            bucket_files().rm(str(path), recursive=True)

    def claim(self, config: bytes) -> None:
        (self.path / "config.json").write_bytes(config)

    def size_and_time(self, folder: StoragePath) -> tuple[int, float]:
        objects = list(_objects(folder))
        newest = max(datetime.fromisoformat(entry["updated"]) for _, entry in objects)
        return sum(entry["size"] for _, entry in objects), newest.timestamp()

    def _checkpoints(self, complete: bool) -> list[StoragePath]:
        paths = (path for path in self._entries() if path.name.isdigit())
        return [path for path in paths if (path / MANIFEST_NAME).exists() == complete]

    def _entries(self) -> list[StoragePath]:
        try:
            names = bucket_files().ls(str(self.path), detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:  # errors of the network and its libraries share no class
            raise OSError(errno.EIO, bucket_error(error), str(self.path)) from None
        paths = (epath.Path("gs://" + name.rstrip("/")) for name in sorted(names))
        # Consoles mark a folder that they create by an object of that name.
        return [path for path in paths if path != self.path]


def checksums(folder: StoragePath) -> dict[str, list[int | str]]:
    """Sizes in bytes and the storage's own checksums (CRC32C) of the objects under an address, by
    their names in it; nothing is downloaded."""
    return {name: [entry["size"], f"crc32c:{entry['crc32c']}"] for name, entry in _objects(folder)}


def bucket_error(error: BaseException) -> str:
    """First line of an error from the libraries that access Google Cloud Storage."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = str(error.strerror)
    lines = text.partition(" [source locations=")[0].strip().splitlines()
    return (lines or [type(error).__name__])[0][:LONGEST_ERROR].rstrip(".")


@cache
def bucket_files() -> Any:
    """Files in Google Cloud Storage, whose listings are never cached; ValueError without gcsfs."""
    from fsspec import filesystem
    from fsspec.config import conf

    import_extra("gcsfs", "gcs", "a directory in gs://")
    # Orbax and TensorStore write as well, so cached listings would be outdated.
    conf.setdefault("gs", {})["use_listings_cache"] = False
    for name in ("gcsfs", "google.auth"):  # they also raise whatever they log
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return filesystem("gs")


def _objects(folder: StoragePath) -> Iterator[tuple[str, dict[str, Any]]]:
    prefix = str(folder).removeprefix("gs://") + "/"
    for name, entry in sorted(bucket_files().find(str(folder), detail=True).items()):
        yield name.removeprefix(prefix), entry


def _free_name(path: StoragePath) -> StoragePath:
    """The path, or the first of ``path-2``, ``path-3``, ... that does not exist."""
    candidate, index = path, 2
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{index}")
        index += 1
    return candidate
