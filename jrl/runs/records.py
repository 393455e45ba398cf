"""Files of JSON lines that survive a kill: append, read, and truncate to an offset.

Every line is one JSON object with an integer ``"step"``. Floats are written as the shortest decimal
that reads back to the same bits. JSON has no NaN and no infinity, so they become the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (the spelling that Python's ``float`` and Protobuf's
JSON read); `read_metrics` turns them back into floats.

An offset is the length and the SHA-256 of a file at a checkpoint. The run resumes from the
checkpoint with exactly these bytes; later lines are written again.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any, SupportsFloat

FileOffset = dict[str, Any]
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
"""Advice to users on errors of the operating system."""
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that do not support or need syncing of folders."""


class Appender:
    """Appends records to a file, each passed to the operating system before `append` returns.

    A kill can lose only the line being written.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        # Unbuffered: data rejected by a full disk would otherwise be written again at the end.
        self._file = self.path.open("ab", buffering=0)

    def append(self, step: int, record: Mapping[str, Any]) -> None:
        """Write one line; several may share a step.

        Args:
          record: JSON values and scalars of numpy or jax. It must not contain "step" itself.

        Raises:
          OSError: with the name of the file, if it cannot be written.
        """
        if "step" in record:
            raise ValueError('record holds "step", which is the first argument: leave it out')
        line = json.dumps({"step": int(step), **plain(record)}, ensure_ascii=False, allow_nan=False)
        # A lone surrogate has no UTF-8 encoding, but its backslash escape is also the JSON escape.
        content = (line + "\n").encode(errors="backslashreplace")
        with naming(self.path):
            _write_all(self._file, content)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context that adds the name of a file and a remedy to errors of the operating system that have
    no name, for example errors of writing."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        reason, remedy = os.strerror(error.errno), REMEDIES.get(error.errno)
        text = reason if remedy is None else f"{reason}: {remedy}, then continue with --resume"
        raise OSError(error.errno, text, str(path)) from error


def sync_folder(path: Path) -> None:
    """Syncs the names in a folder to disk, if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def plain(value: Any) -> Any:
    """Convert `value` to JSON values: numpy and jax scalars to numbers, NaN to a string."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, SupportsFloat):
        raise ValueError(f"a record holds {value!r} of type {type(value).__name__}: JSON cannot")
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def read(path: Path | str) -> list[dict[str, Any]]:
    """Return the records of a file, except a last line that is still being written; ValueError for
    any other line that is not a JSON object with an integer step."""
    path = Path(path)
    *lines, last = path.read_bytes().split(b"\n")
    if last and record_of(last) is not None:
        # Killed between the record and its newline: the record is complete.
        lines.append(last)
    records = []
    for line_number, line in enumerate(lines, start=1):
        record = record_of(line)
        if record is None:
            raise ValueError(
                f"{path}:{line_number} is not a JSON object with an integer step: {line[:60]!r}; "
                "put the file back as it was, or repair that line"
            )
        records.append(record)
    return records


def read_metrics(path: Path | str) -> list[dict[str, float | int]]:
    """Return one dict per line with every value a number, NaN and infinities included; ValueError
    as in `read`, and for a value that is no number."""
    metrics = []
    for line_number, record in enumerate(read(path), start=1):
        numbers = {name: _number(value) for name, value in record.items()}
        for name, value in numbers.items():
            if value is None:
                raise ValueError(
                    f"{path}:{line_number}: {name} is {_short(record[name])}, not a number: "
                    "put the file back as it was, or repair that line"
                )
        metrics.append(numbers)
    return metrics


def read_samples(path: Path | str) -> list[dict[str, Any]]:
    """Return the completions of a run: records with the texts "kind", "prompt" and "completion",
    the number "score", and more. ValueError as in `read`, and for a record that lacks one of
    these."""
    samples = read(path)
    for line_number, sample in enumerate(samples, start=1):
        for name in ("kind", "prompt", "completion", "score"):
            value = sample.get(name)
            is_valid = isinstance(value, str) if name != "score" else _number(value) is not None
            if not is_valid:
                defect = f"has {name} {_short(sample[name])}" if name in sample else f"lacks {name}"
                raise ValueError(
                    f"{path}:{line_number}: the sample {defect}: each has texts kind, prompt and "
                    "completion and a number score; put the file back as it was, or delete that "
                    "line"
                )
    return samples


def replace(path: Path, content: bytes) -> None:
    """Replace the content of the file `path` atomically: a kill leaves the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    try:
        # Not by `tempfile`, whose files are private to their owner, whatever the umask. Exclusive,
        # as a link of that name would lead elsewhere.
        with naming(path), temporary.open("xb", buffering=0) as file:
            _write_all(file, content)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file; `remedy` is the advice in the error for any other
    content."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not an object; {remedy}")
    return content


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, None if it is not a JSON object with a step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return None
    if isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] < 2**63:
        return record
    return None


def _number(value: Any) -> float | int | None:
    """Return the number in a record, None if it is not a number."""
    if isinstance(value, str):
        return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
    if isinstance(value, bool) or not isinstance(value, float | int):
        return None
    return value if abs(value) < 2**63 or isinstance(value, float) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_offset(path: Path) -> FileOffset:
    """Length and SHA-256 of a file, synced first, so that a checkpoint never outlives its lines."""
    if not path.exists():
        return offset_of(b"")
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
        return offset_of(file.read())


def begins_with(path: Path, offset: FileOffset) -> bool:
    """True if the file begins with its content at an offset; a missing file has no content."""
    content = path.read_bytes() if path.exists() else b""
    return offset_of(content[: offset["bytes"]]) == offset


def truncate(path: Path, offset: FileOffset, step: int, *, every_step: bool) -> None:
    """Cuts the file back to an offset in one atomic replacement.

    Args:
      path: the file; it may be missing only if it was missing at the offset.
      step: step of the checkpoint with the offset, for error messages.
      every_step: whether the file has one line for each step from 0 on; otherwise a step may have
        several lines or none.

    Raises:
      ValueError: if it does not start with its content at the offset, naming the first line with
        a fault; the file is then unchanged.
    """
    content = path.read_bytes() if path.exists() else b""
    prefix = content[: offset["bytes"]]
    if offset_of(prefix) == offset:
        if len(content) > len(prefix):
            replace(path, prefix)
        return
    if not path.exists():
        reason = " is missing"
    else:
        reason = _first_fault(content, step, every_step) or (
            f": the first {offset['bytes']} bytes were changed, or are those of another run"
        )
    raise ValueError(
        f"{path}{reason}; the checkpoint of step {step} continues after the lines that were "
        "written up to it, in order and unchanged. Put the file back as it was, or start a new "
        f"run from this policy with --weights {path.parent}"
    )


def _write_all(file: RawIOBase, content: bytes) -> None:
    """Writes bytes to an unbuffered file, which may accept a part of them at a time."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def offset_of(content: bytes) -> FileOffset:
    """Length and SHA-256 of a content."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _first_fault(content: bytes, step: int, every_step: bool) -> str | None:
    """First fault of the lines up to a step, without the offset; None if there is none."""
    previous_step = -1
    *lines, _ = content.split(b"\n")
    for line_number, line in enumerate(lines, start=1):
        record = record_of(line)
        if record is None:
            return f":{line_number} is not a JSON object with an integer step"
        line_step = record["step"]
        if every_step and line_step != previous_step + 1:
            return (
                f":{line_number} is of step {line_step} where step {previous_step + 1} is expected"
            )
        if line_step < previous_step:
            return f":{line_number} is of step {line_step} after one of step {previous_step}"
        if line_step > step or (every_step and line_step == step):
            return None
        previous_step = line_step
    if every_step:
        return f" ends with line {len(lines)}, before the one of step {previous_step + 1}"
    return None
