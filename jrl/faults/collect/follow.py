"""Incremental reading of records that are being written, as ``tail -f`` does."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jrl.faults.collect.record import (
    SUFFIX,
    Header,
    Record,
    decode,
    describe_unreadable,
    read_header,
)


@dataclass
class _File:
    """Read position of a file, and the rows of it that are kept."""

    inode: int
    header: Header
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
        """The newest `last` rows of every file, those of earlier calls included, and one line for
        each file that cannot be read."""
        self.bytes_read = 0
        records, unreadable = [], []
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        for path in paths:
            try:
                records.append(self._follow(path))
            except (ValueError, OSError) as error:  # such as a file that was deleted meanwhile
                self._files.pop(path, None)
                unreadable.append(describe_unreadable(path, error))
        self._files = {path: each for path, each in self._files.items() if path in paths}
        return records, unreadable

    def _follow(self, path: Path) -> Record:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            state = self._files.get(path)
            if state is None or state.inode != status.st_ino or state.offset > status.st_size:
                state = self._begin(path, file, status)
            row_size = state.header.row_dtype.itemsize
            complete_rows = (status.st_size - state.offset) // row_size
            file.seek(state.offset)
            content = file.read(complete_rows * row_size)
        self.bytes_read += len(content)
        content = content[: len(content) // row_size * row_size]
        state.offset += len(content)
        torn = (status.st_size - state.offset) % row_size
        new = decode(state.header, content, torn)
        state.record = self._append_rows(state.record, new, bool(content))
        self._files[path] = state
        return state.record

    def _begin(self, path: Path, file: BinaryIO, status: os.stat_result) -> _File:
        header = read_header(path, file)
        self.bytes_read += header.size
        rows = (status.st_size - header.size) // header.row_dtype.itemsize
        offset = header.size + max(0, rows - self.last) * header.row_dtype.itemsize
        return _File(status.st_ino, header, offset, decode(header, b"", 0))

    def _append_rows(self, old: Record, new: Record, has_rows: bool) -> Record:
        """The newest rows of both; it has ended if the last row written is the end marker."""
        return replace(
            new,
            times=np.concatenate([old.times, new.times])[-self.last :],
            values=np.concatenate([old.values, new.values])[-self.last :],
            damaged=old.damaged + new.damaged,
            ended=new.ended if has_rows else old.ended,
        )
