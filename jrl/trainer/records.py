"""Files of JSON lines that survive a kill: append, read, and go back to a step.

Every line is one JSON object with an integer ``"step"``. Floats are written as the shortest decimal
that reads back to the same bits. JSON has no NaN and no infinity, so they become the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` (the spelling that Python's ``float`` and Protobuf's
JSON read); `read_metrics` turns them back into floats.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat


class Appender:
    """Appends records to a file, each flushed to the operating system before `append` returns.

    A kill can therefore lose the line being written and no other.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        # A lone surrogate has no UTF-8, but its backslash escape is also the JSON escape.
        self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")

    def append(self, step: int, record: Mapping[str, Any]) -> None:
        """Write one line.

        Args:
          step: the step the record belongs to; several lines may share one.
          record: JSON values and scalars of numpy or jax. It must not hold "step" itself.
        """
        if "step" in record:
            raise ValueError('record holds "step", which is the first argument: leave it out')
        line = json.dumps({"step": int(step), **plain(record)}, ensure_ascii=False, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Appender":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: numpy and jax scalars as numbers, NaN as a string."""
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
    """Return the records of a file, without a last line that is still being written.

    Raises:
      ValueError: for any other line that is not a JSON object with an integer step.
    """
    return [record for record, _ in _parse(Path(path))]


def read_metrics(path: Path | str) -> list[dict[str, float | int]]:
    """Return one dict per line with every value a number, NaN and infinities included."""
    return [
        {name: float(value) if isinstance(value, str) else value for name, value in record.items()}
        for record in read(path)
    ]


def go_back(path: Path | str, step: int) -> None:
    """Drop the records after `step`, and a half-written last line, in one atomic replacement.

    Args:
      path: the file; one that does not exist yet is left so.
      step: the last step to keep.

    Raises:
      ValueError: as `read` does; the file is then untouched.
    """
    path = Path(path)
    if not path.exists():
        return
    kept = b"".join(line + b"\n" for record, line in _parse(path) if record["step"] <= step)
    if kept != path.read_bytes():
        replace(path, kept)


def replace(path: Path, content: bytes) -> None:
    """Give the file `path` new content so that a kill leaves the old or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _parse(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Return each record beside the bytes of its line."""
    *lines, last = path.read_bytes().split(b"\n")
    if last and _record(last) is not None:
        # Killed between the record and its newline: nothing of it is missing.
        lines.append(last)
    records = []
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            raise ValueError(
                f"{path}:{number} is not a JSON object with an integer step: {line[:60]!r}; "
                "repair or delete that line"
            )
        records.append((record, line))
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    if isinstance(record, dict) and isinstance(record.get("step"), int):
        return record
    return None
