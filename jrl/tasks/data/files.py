"""Tasks from files: JSON lines, CSV, Parquet, and folders that Hugging Face's `datasets` saved.

A file of JSON lines or CSV may be compressed by gzip, and JSON lines may be one JSON array of
objects instead. Each record comes with its location, for error messages: lines, rows and the
objects of an array are counted from 1. The fields of a line or a row are described in
`jrl.tasks.data.records`. Numbers are compared exactly and formulas by math-verify
(`jrl.tasks.answers.verdict`).
"""

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jrl.tasks.answers.verdict import FINAL
from jrl.tasks.data.fields import (
    Fields,
    JsonObject,
    Number,
    Row,
    find_prompt,
    short,
    to_python,
)
from jrl.tasks.data.prompt_list import FiniteTask, PromptList, drop_repeated
from jrl.tasks.data.records import check_sendable, example_of
from jrl.tasks.data.split import HeldOut
from jrl.tasks.task import Example
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Message, parse_failure, program_worker

KINDS = ("jsonl", "csv", "parquet", "dataset")
"""Kinds of files: JSON lines, comma-separated values, a Parquet file or a folder of them, and a
folder of `save_to_disk`."""
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
"""First bytes of files in these formats."""

NUMPY_TYPES = {"halffloat": np.float16, "float": np.float32}
"""NumPy's types of Arrow's 16- and 32-bit numbers, by name."""
DATASET_BATCH_SIZE = 1000
"""Rows of a folder of `save_to_disk` that are read at once."""

LocatedRecord = tuple[str, Any]
"""Location of a record, and the record."""


def read_records(kind: str, path: str | Path) -> Iterator[LocatedRecord]:
    """The records of a file or folder of this kind, one of `KINDS`.

    Raises:
      ValueError: if it cannot be read, or its reader is not installed.
    """
    readers = {
        "jsonl": _read_jsonl,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "dataset": _read_dataset,
    }
    return readers[kind](Path(os.path.expanduser(path)))


def name_prompts(
    records: Iterable[LocatedRecord], fields: Fields | None, names: dict[str, None]
) -> Iterator[LocatedRecord]:
    """The same records; meanwhile `names` receives the names of the prompts' fields that are read
    without a setting (`jrl.tasks.data.fields.find_prompt`)."""
    for location, record in records:
        if (named := find_prompt(record, fields, location)) != (fields or Fields()):
            names[named.prompt] = None
        yield location, record


def kind_of(path: str | Path) -> str:
    """The kind of a file or folder by its name."""
    path = Path(os.path.expanduser(path))
    if path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return "parquet"
    if any(suffix in (".csv", ".tsv") for suffix in path.suffixes[-2:]):
        return "csv"
    return "dataset" if path.is_dir() else "jsonl"


def _read_bytes(path: Path, content: str) -> bytes:
    """Content of a file of lines, uncompressed."""
    try:
        read = path.read_bytes()
        if read.startswith(GZIP):
            read = gzip.decompress(read)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read ({reason}): give a file of {content}") from error
    if read.startswith(PARQUET):
        raise ValueError(f"{path}: is a Parquet file: give parquet:{path}")
    return read.removeprefix(b"\xef\xbb\xbf")


def _read_csv(path: Path) -> Iterator[LocatedRecord]:
    """Rows under a first row of names (RFC 4180); an empty cell is an absent field. Columns of a
    ``.tsv`` file are separated by tabs."""
    delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","
    try:
        text = _read_bytes(path, "comma-separated values").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error.reason}): convert the file") from error
    csv.field_size_limit(max(len(text), csv.field_size_limit()))
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1
    try:
        for row in rows:
            location, line = f"{path}:{line}", rows.line_num + 1
            if not names:
                names = row
                _check_names(names, location, delimiter)
            elif row and len(row) != len(names):
                raise ValueError(
                    f"{location}: has {len(row)} cells under {len(names)} names: quote a cell with "
                    "a separator or a line break in it"
                )
            elif row:
                yield location, Row(zip(names, (cell or None for cell in row), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: is not CSV ({error}): quote its texts") from error


def _check_names(names: Sequence[str], location: str, delimiter: str) -> None:
    """Rejects names of columns that are empty, come twice, or are separated by something else."""
    if len(names) == 1 and (other := re.search(r"[;\t,|]", names[0])):
        raise ValueError(
            f"{location}: has one column, {short(names[0])}: separate columns by "
            f"{delimiter!r}, not {other[0]!r}"
        )
    for name in names:
        if not name.strip() or names.count(name) > 1:
            raise ValueError(
                f"{location}: the column name {short(name)} is empty or comes twice: the first row "
                "has the name of each column"
            )


def _read_jsonl(path: Path) -> Iterator[LocatedRecord]:
    content = _read_bytes(path, "JSON lines")
    if (records := _parse_array(content)) is not None:
        for number, record in enumerate(records, start=1):
            yield f"{path}:{number}", record
        return
    for line, row in enumerate(content.split(b"\n"), start=1):
        if row.strip():
            yield f"{path}:{line}", _parse_line(row, f"{path}:{line}")


def _parse_array(content: bytes) -> list[Any] | None:
    """The entries of a file that is one JSON array; None of any other, whose lines are parsed one
    by one."""
    if not content.lstrip().startswith(b"["):
        return None
    try:
        return json.loads(content.decode("utf-8"), parse_float=Number)
    except (ValueError, RecursionError):
        return None


def _parse_line(row: bytes, location: str) -> Mapping[str, Any]:
    try:
        return json.loads(row.decode("utf-8"), parse_float=Number)
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: is not UTF-8 ({error.reason}): convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{location}: is not JSON ({error}): write one {{"prompt": ..., "answer": ...}} per'
            " line, or one JSON array of them"
        ) from error


def _read_parquet(path: Path) -> Iterator[LocatedRecord]:
    _check_installed("pyarrow", "data", f"parquet:{path}")
    import pyarrow
    import pyarrow.parquet

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ValueError(
            f"{path}: holds no .parquet file: give a Parquet file, or a folder of them"
        )
    for file in files:
        try:
            table = pyarrow.parquet.read_table(file)
            rows = table.to_pylist(maps_as_pydicts="strict")
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(
                f"{file}: cannot be read ({error}): give a Parquet file, or a folder of them"
            ) from error
        for row_number, row in enumerate(_table_rows(rows, table.schema), start=1):
            yield f"{file}:{row_number}", row


def _read_dataset(path: Path) -> Iterator[LocatedRecord]:
    _check_installed("datasets", "data", f"dataset:{path}")
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
    # As Arrow stores them: media are not decoded, and JSON text is decoded as in Parquet files.
    batches: Any = dataset.with_format("arrow").iter(DATASET_BATCH_SIZE)
    rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict"))
    located_rows = _table_rows(rows, dataset.features.arrow_schema)
    for row_number, row in enumerate(located_rows, start=1):
        yield f"{path}:{row_number}", row


def _table_rows(rows: Iterable[Any], schema: Any) -> Iterator[Row]:
    """Rows of a table, in which 16- and 32-bit numbers are NumPy's (`to_python`), and values of the
    type Json of `datasets` are decoded."""
    decoders = {field.name: decode for field in schema if (decode := _decoder(field.type))}
    for row in rows:
        yield Row(_decode_fields(row, decoders))


def _decoder(type: Any) -> Callable[[Any], Any] | None:
    """A function that decodes values of an Arrow type; None if they stay as they are."""
    import pyarrow

    if (of_type := NUMPY_TYPES.get(str(type))) is not None:
        return lambda value: None if value is None else to_python(of_type(value))
    if getattr(type, "extension_name", None) == "arrow.json":
        return _decode_json
    if pyarrow.types.is_struct(type):
        decoders = {field.name: decode for field in type if (decode := _decoder(field.type))}
        if decoders:
            return lambda value: value and _decode_fields(value, decoders)
    is_list = pyarrow.types.is_list(type) or pyarrow.types.is_large_list(type)
    # Not embeddings, which have thousands of numbers.
    if not is_list or str(type.value_type) in NUMPY_TYPES:
        return None
    of_entry = _decoder(type.value_type)
    return None if of_entry is None else partial(_decode_list, of_entry)


def _decode_fields(
    fields: Mapping[str, Any], decoders: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    return {k: decoders[k](v) if k in decoders else v for k, v in fields.items()}


def _decode_list(decode: Callable[[Any], Any], values: Sequence[Any] | None) -> Any:
    return values and [decode(each) for each in values]


def _decode_json(text: str | None) -> Any:
    """The value of a JSON text of a table; a text that is no JSON stays as it is."""
    try:
        return None if text is None else json.loads(text, object_hook=JsonObject)
    except (ValueError, RecursionError):
        return text


def _check_installed(library: str, extra: str, task: str) -> None:
    if find_spec(library.replace("-", "_")) is None:
        raise ValueError(
            f'task={task} needs {library}, which is not installed: run pip install -e ".[{extra}]"'
        )


DROP, REFUSE = "drop", "refuse"
UNREADABLE = (DROP, REFUSE)
"""What is done about records whose answer cannot be checked."""
MAX_UNREADABLE_SHARE = 0.1
"""Maximum share of the answers of a file that may be unreadable; more are a fault of the file."""
CHECK_BATCH_SIZE = 512
"""Answers per batch: with `REFUSE` the first unreadable one ends the check."""


def jsonl(
    path: str | Path,
    seed: int,
    *,
    fields: Fields | None = None,
    seconds: float = 5.0,
    workers: int | None = None,
    kind: str = "jsonl",
    heldout: HeldOut | None = None,
    answers: str = FINAL,
    unreadable: str = DROP,
) -> FiniteTask:
    """Reads a file of prompts and answers.

    Args:
      path: path of the file.
      seed: selects the order of the training examples.
      fields: names of the fields; None is `Fields()`.
      seconds: time limit of comparing one completion with its answer.
      workers: processes that compare; None is one per processor core, up to 8.
      kind: kind of the file, one of `jrl.tasks.data.files.KINDS`.
      heldout: which prompts are held out; None is one in ten.
      answers: required form of answers, one of `jrl.tasks.answers.verdict.RULES`.
      unreadable: what is done about records whose answer cannot be checked, one of `UNREADABLE`:
        leave them out, or raise an error.

    Raises:
      ValueError: the file or a line of it cannot be read, more than `MAX_UNREADABLE_SHARE` of its
        answers cannot be checked, a prompt has two answers, there are fewer than two examples, or
        math-verify is not installed.
    """
    _check_installed("math-verify", "math", f"{kind}:{path}")
    prompts = prompts_of(kind, path, seed, fields, heldout, answered=True)
    pool = Pool(lambda: program_worker("math", answers, seconds=seconds), workers)
    try:
        _leave_out_unreadable(prompts, pool, unreadable)
    except BaseException:
        pool.close()
        raise
    return FiniteTask(prompts, pool, _question)


def prompts_of(
    kind: str,
    path: str | Path,
    seed: int,
    fields: Fields | None = None,
    heldout: HeldOut | None = None,
    *,
    answered: bool = False,
) -> PromptList:
    """The prompts of a file, with answers, or without for custom rewards.

    Args:
      kind, path, seed, fields, heldout: as of `jsonl`.
      answered: whether all must have an answer; otherwise their fields must be sendable to rewards.

    Raises:
      ValueError: as for `jsonl`, but for answers that cannot be compared.
    """
    heldout = HeldOut() if heldout is None else heldout
    others, repeated_others, names = None, 0, {}
    if heldout.path is not None:
        kind_of_others = kind_of(heldout.path)
        others, repeated_others = _read_unique(
            kind_of_others, heldout.path, fields, answered, names
        )
    examples, repeated = _read_unique(kind, path, fields, answered, names)
    everything = heldout.everything
    if not examples or (len(examples) < 2 and others is None and not everything):
        needed = "at least 1 is" if everything else "at least 2 are"
        both = "" if everything else ", one to train on and one held out"
        raise ValueError(
            f"{path}: has {len(examples)} examples; {needed} needed{both}: write one "
            '{"prompt": ..., "answer": ...} per line'
        )
    num_repeated = repeated + repeated_others
    prompts = PromptList(f"{kind}:{path}", examples, seed, heldout, others, kind, num_repeated)
    prompts.prompt_fields = tuple(names)
    return prompts


def _read_unique(
    kind: str, path: str | Path, fields: Fields | None, answered: bool, names: dict[str, None]
) -> tuple[list[Example], int]:
    """The examples of a file, as of `jrl.tasks.data.prompt_list.drop_repeated`; `names` receives
    the names of the prompts' fields that no setting names."""
    examples, repeated = drop_repeated(
        example_of(record, location, fields, answered=answered)
        for location, record in name_prompts(read_records(kind, path), fields, names)
    )
    if not answered:
        for example in examples:
            check_sendable(example, example.location)
    return examples, repeated


def _question(example: Example, completion: str) -> Message:
    return {"gold": example.answer, "completion": completion}


def _leave_out_unreadable(prompts: PromptList, pool: Pool, unreadable: str) -> None:
    """Leaves out the records whose answer, as its own completion, is not correct.

    Raises:
      ValueError: if there is one and `unreadable` is `REFUSE`, or if they are too many.
    """
    if unreadable not in UNREADABLE:
        raise ValueError(
            f"unreadable_answers={unreadable!r} is unknown: choose one of {', '.join(UNREADABLE)}"
        )
    distinct = list({example.answer: example for example in reversed(prompts.examples)}.values())
    distinct.reverse()
    reasons: dict[str, str] = {}
    for first in range(0, len(distinct), CHECK_BATCH_SIZE):
        batch = distinct[first : first + CHECK_BATCH_SIZE]
        replies = pool.ask_all([_question(example, example.answer) for example in batch])
        for example, reply in zip(batch, replies, strict=True):
            answer = parse_failure(reply)
            if answer.get("reason") != "correct":
                why = answer.get("message", "it does not even equal itself")
                reasons[example.answer] = why
        if reasons and unreadable == REFUSE:
            break
    bad = [example for example in prompts.examples if example.answer in reasons]
    if not bad:
        return
    if unreadable == REFUSE or len(bad) > MAX_UNREADABLE_SHARE * len(prompts.examples):
        example = bad[0]
        many = f"{len(bad)} of {len(prompts.examples)} answers cannot be checked; the first is "
        raise ValueError(
            f"{example.location}: {many if unreadable == DROP and len(bad) > 1 else ''}answer "
            f"{short(example.answer)} cannot be checked ({reasons[example.answer]}): write a "
            "number, a word, a formula, or a text that ends in \\boxed{...}, or give a custom "
            "--reward"
        )
    prompts.leave_out(lambda example: example.answer not in reasons, why="have unreadable answers")
    prompts.unreadable = tuple(example.location for example in bad)
