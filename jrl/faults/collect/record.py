"""File format of one process's samples: append-only rows that survive ``kill -9`` mid-write.

A header names the columns; rows of constant size follow, so that every column is one stride through
the file and no index can be lost. All numbers are little-endian:

    header  magic (8 bytes), length of the JSON (uint32), its CRC-32 (uint32), JSON
    row     Unix time (float64), one float32 per column, CRC-32 of these bytes (uint32)

The CRC of a row starts from the header's. A row is one ``write``, so a kill can tear the last row
and no other; the reader leaves out torn and damaged rows and counts them. A clean end is a row with
a time whose values are all NaN. A file can be read while it is written: complete rows are returned,
and `Follower` returns what was added since, as ``tail -f`` does.
"""

import json
import os
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
from jaxtyping import Float32, Float64

MAGIC = b"JRLFAULT"
SUFFIX = ".samples"
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True)
class Record:
    """Content of one file.

    Attributes:
      machine: name of the machine that was sampled.
      host, pid: name of its host, and the process id there.
      begun: Unix time at which the file was started, in seconds.
      columns: name of each metric.
      times: Unix time of each sample in seconds, in the order they were written.
      values: one row per sample, NaN if a metric had no value.
      damaged: rows left out because their checksum is wrong.
      torn: bytes left out at the end that are not a full row.
      ended: true if the file ends with the end marker, a row of NaN values.
    """

    machine: str
    host: str
    pid: int
    begun: float
    columns: tuple[str, ...]
    times: Float64[np.ndarray, "sample"]
    values: Float32[np.ndarray, "sample column"]
    damaged: int = 0
    torn: int = 0
    ended: bool = False


class Writer:
    """Appends samples to a new file, each handed to the operating system before `append` returns.

    Args:
      folder: folder of the file, created if missing. The file is called ``MACHINE.NUMBER.samples``;
        a restarted process gets the next number.
      machine: the name under which it is compared with others.
      columns: names of the metrics, all different.
      begun: Unix time in seconds.

    Raises:
      ValueError: where the machine's name is no file name, or columns repeat.
    """

    def __init__(
        self,
        folder: Path | str,
        machine: str,
        columns: Sequence[str],
        *,
        begun: float | int,
    ):
        if not machine or machine.startswith(".") or "/" in machine or "\0" in machine:
            raise ValueError(f"machine={machine!r} must be usable as the start of a file name.")
        if len(set(columns)) != len(columns):
            raise ValueError(f"columns={list(columns)} must all be different.")
        self.columns = tuple(columns)
        header = {
            "machine": machine,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "begun": float(begun),
            "columns": list(columns),
        }
        text = json.dumps(header).encode()
        self._seed = zlib.crc32(text)
        self._row = struct.Struct(f"<d{len(self.columns)}f")
        self.path, self._file = _create(Path(folder), machine)
        os.write(self._file, _PREFIX.pack(MAGIC, len(text), self._seed) + text)

    def append(self, time: float | int, values: Mapping[str, float | int]) -> None:
        """Writes one sample; a column that is not in `values` is NaN.

        With no value it is the end marker that `close` writes.

        Raises:
          ValueError: on a value for which there is no column.
        """
        unknown = values.keys() - set(self.columns)
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]!r} is not a column of {self.path.name}.")
        row = [float(values.get(name, np.nan)) for name in self.columns]
        content = self._row.pack(time, *np.asarray(row, np.float32).tolist())
        os.write(self._file, content + struct.pack("<I", zlib.crc32(content, self._seed)))

    def close(self, time: float | int) -> None:
        """Writes the row of NaN values that marks a clean end. A second call does nothing."""
        if self._file >= 0:
            self.append(time, {})
            os.close(self._file)
            self._file = -1


def read(path: Path | str, last: int | None = None) -> Record:
    """Reads a file, which another process may be writing.

    Args:
      last: rows at most, the newest; None reads all.

    Raises:
      ValueError: where the file is no record or its header is damaged or truncated.
      OSError: if it cannot be read.
    """
    path = Path(path)
    return Follower(path.parent, sys.maxsize if last is None else last).follow(path)


def read_folder(folder: Path | str) -> tuple[list[Record], list[str]]:
    """All records of a folder, and one line for each file that cannot be read."""
    return Follower(Path(folder), sys.maxsize).read()


def _create(folder: Path, machine: str) -> tuple[Path, int]:
    """Creates a new file under the next free index."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    index = 1
    while True:
        path = folder / f"{machine}.{index}{SUFFIX}"
        try:
            return path, os.open(path, flags, 0o644)
        except FileExistsError:
            index += 1


def _read_header(path: Path, file: BinaryIO) -> tuple[Record, int]:
    """The record, without its samples, and the checksum from which its rows' start."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise ValueError(f"{path} has a truncated header: delete it, it holds no sample.")
    magic, length, seed = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ValueError(f"{path} is not a record of samples: give a file that a sampler wrote.")
    text = file.read(length)
    if len(text) < length or zlib.crc32(text) != seed:
        raise ValueError(f"{path} has a damaged header: its columns are lost; delete it.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not _is_header(content):
        raise ValueError(f"{path} has a header that no sampler wrote: delete it.")
    columns = tuple(content["columns"])
    names = {name: content[name] for name in ("machine", "host", "pid", "begun")}
    values = np.zeros((0, len(columns)), np.float32)
    return Record(**names, columns=columns, times=np.zeros(0), values=values), seed


def _is_header(header: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(header, dict) or not isinstance(header.get("columns"), list):
        return False
    texts = (header.get("machine"), header.get("host"), *header["columns"])
    numbers = (header.get("pid"), header.get("begun"))
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(number, int | float) for number in numbers
    )


def _row_type(columns: Sequence[str]) -> np.dtype:
    """Structured dtype of a row."""
    return np.dtype([("time", "<f8"), ("values", "<f4", (len(columns),)), ("crc", "<u4")])


@dataclass
class _File:
    """Read position of a file, and the newest rows of it."""

    inode: int
    seed: int
    offset: int
    record: Record


@dataclass
class Follower:
    """Reads the records of a folder; each further call reads only what was written since.

    A file that was replaced or truncated is read again, its last `last` rows only. A row that is
    half written is left for the next call.

    Attributes:
      folder: the records' folder.
      last: rows of each file that are kept, the newest.
      bytes_read: by the last call.
    """

    folder: Path
    last: int
    bytes_read: int = 0
    _files: dict[Path, _File] = field(default_factory=dict)

    def read(self) -> tuple[list[Record], list[str]]:
        """The newest rows of every file, and one line for each file that cannot be read."""
        self.bytes_read = 0
        records, unreadable = [], []
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        for path in paths:
            try:
                records.append(self.follow(path))
            except ValueError as error:
                unreadable.append(str(error))
            except OSError as error:  # such as of a file that was deleted meanwhile
                unreadable.append(f"{path} cannot be read: {error.strerror}.")
        self._files = {path: each for path, each in self._files.items() if path in paths}
        return records, unreadable

    def follow(self, path: Path) -> Record:
        """The newest rows of one file, including rows of earlier calls, see `read`."""
        state = self._files.pop(path, None)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if state is None or state.inode != status.st_ino or state.offset > status.st_size:
                state = self._begin(path, file, status)
            row_size = _row_type(state.record.columns).itemsize
            complete_rows = (status.st_size - state.offset) // row_size
            file.seek(state.offset)
            content = file.read(complete_rows * row_size)
        self.bytes_read += len(content)
        content = content[: len(content) // row_size * row_size]  # it may have been cut
        state.offset += len(content)
        state.record = replace(
            self._append_rows(state.record, content, state.seed),
            torn=(status.st_size - state.offset) % row_size,
        )
        self._files[path] = state
        return state.record

    def _begin(self, path: Path, file: BinaryIO, status: os.stat_result) -> _File:
        record, seed = _read_header(path, file)
        offset, row_size = file.tell(), _row_type(record.columns).itemsize
        self.bytes_read += offset
        skipped = max(0, (status.st_size - offset) // row_size - self.last)
        return _File(status.st_ino, seed, offset + skipped * row_size, record)

    def _append_rows(self, record: Record, content: bytes, seed: int) -> Record:
        """A record with further rows; it has ended if the last of all is the end marker."""
        rows = np.frombuffer(content, _row_type(record.columns))
        if not len(rows):
            return record
        size, view = rows.dtype.itemsize, memoryview(content)
        checksums = [zlib.crc32(view[i : i + size - 4], seed) for i in range(0, len(view), size)]
        good = np.array(checksums, np.uint32) == rows["crc"]
        ended = bool(good[-1] and np.isnan(rows["values"][-1]).all())
        samples = rows[good][:-1] if ended else rows[good]
        samples = samples[np.isfinite(samples["time"])]
        return replace(
            record,
            times=np.concatenate([record.times, samples["time"]])[-self.last :],
            values=np.concatenate([record.values, samples["values"]])[-self.last :],
            damaged=record.damaged + len(rows) - int(good.sum()),
            ended=ended,
        )
