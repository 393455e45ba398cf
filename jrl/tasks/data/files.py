"""Records from files: JSON lines, Parquet, and folders that Hugging Face's `datasets` saved.

Each record comes with its location, for error messages: lines and rows are counted from 1.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jrl.tasks.data.fields import Number, Row

KINDS = ("jsonl", "parquet", "dataset")
"""Kinds of files: JSON lines, a Parquet file or a folder of them, a folder of `save_to_disk`."""

LocatedRecord = tuple[str, Any]
"""Location of a record, and the record."""


def read_records(kind: str, path: str | Path) -> Iterator[LocatedRecord]:
    """The records of a file or folder of this kind, one of `KINDS`.

    Raises:
      ValueError: where it cannot be read, or what reads it is not installed.
    """
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "dataset": _read_dataset}
    return readers[kind](Path(path))


def kind_of(path: str | Path) -> str:
    """The kind of a file or folder by its name."""
    path = Path(path)
    if path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return "parquet"
    return "dataset" if path.is_dir() else "jsonl"


def _read_jsonl(path: Path) -> Iterator[LocatedRecord]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}): give a file of JSON lines"
        ) from error
    for line, row in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if row.strip():
            yield f"{path}:{line}", _parse_line(row, f"{path}:{line}")


def _parse_line(row: bytes, location: str) -> Mapping[str, Any]:
    try:
        record = json.loads(row.decode("utf-8"), parse_float=Number)
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: is not UTF-8 ({error.reason}): convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{location}: is not JSON ({error}): write one {{"prompt": ..., "answer": ...}} per'
            " line"
        ) from error
    return record


def _read_parquet(path: Path) -> Iterator[LocatedRecord]:
    _check_installed("pyarrow", f"parquet:{path}")
    import pyarrow
    import pyarrow.parquet

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ValueError(
            f"{path}: holds no .parquet file: give a Parquet file, or a folder of them"
        )
    for file in files:
        try:
            rows = pyarrow.parquet.read_table(file).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(
                f"{file}: cannot be read ({error}): give a Parquet file, or a folder of them"
            ) from error
        for row_number, row in enumerate(rows, start=1):
            yield f"{file}:{row_number}", Row(row)


def _read_dataset(path: Path) -> Iterator[LocatedRecord]:
    _check_installed("datasets", f"dataset:{path}")
    import datasets

    try:
        dataset = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}): give a folder that save_to_disk wrote"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        splits = ", ".join(f"{path}/{split}" for split in dataset)
        raise ValueError(f"{path}: holds the splits {splits}: give one of them")
    for row_number, row in enumerate(dataset, start=1):
        yield f"{path}:{row_number}", Row(row)


def _check_installed(library: str, task: str) -> None:
    if find_spec(library) is None:
        raise ValueError(
            f'task={task} needs {library}, which is not installed: run pip install -e ".[data]"'
        )
