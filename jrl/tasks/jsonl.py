"""Prompts and answers from a file of JSON lines, checked by math-verify.

Each line is an object with the texts "prompt" and "answer" (a whole number will do as an answer);
other fields are not read, and blank lines are skipped. How answers are compared is written in
`jrl.tasks.worker`.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from jrl.tasks import worker as worker_program
from jrl.tasks.finite import FiniteTask
from jrl.tasks.pool import Pool
from jrl.tasks.process import Worker
from jrl.tasks.task import Example

# How many answers of a file are tried out when it is loaded; one that cannot be read and lies
# further down gives verdicts with the reason "error".
NUM_TRIED = 1000
# So many at a time: the first that is wrong stops the rest.
TRIED_AT_ONCE = 64


def jsonl(
    path: str | Path, seed: int, *, seconds: float = 5.0, workers: int | None = None
) -> FiniteTask:
    """Reads a file of prompts and answers.

    Args:
      path: where the file is.
      seed: picks the order of the training examples.
      seconds: how long the comparison of one completion with its answer may take.
      workers: processes that compare; None is one per processor core, up to 8.

    Raises:
      ValueError: the file, a line of it or one of its first answers cannot be read, a prompt occurs
        twice, there are fewer than two examples, or math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise ValueError(
            f"task=jsonl:{path} needs math-verify, which is not installed: "
            'run pip install "jrl[math]"'
        )
    numbered = list(_examples(Path(path)))
    if len(numbered) < 2:
        raise ValueError(
            f"{path}: has {len(numbered)} examples; at least 2 are needed, one to train on and one "
            'held out: write one {"prompt": ..., "answer": ...} per line'
        )
    lines: dict[str, int] = {}
    for line, example in numbered:
        if example.prompt in lines:
            raise ValueError(
                f"{path}:{line}: the prompt of line {lines[example.prompt]} again: "
                "keep one of the two"
            )
        lines[example.prompt] = line
    command = [sys.executable, "-P", worker_program.__file__, "math"]
    pool = Pool(lambda: Worker(command, seconds=seconds), workers)
    try:
        for first in range(0, min(len(numbered), NUM_TRIED), TRIED_AT_ONCE):
            _try_answers(pool, path, numbered[first : first + TRIED_AT_ONCE])
    except BaseException:
        pool.close()
        raise
    return FiniteTask(
        f"jsonl:{path}",
        [example for _, example in numbered],
        seed,
        pool,
        lambda example, completion: {"gold": example.answer, "completion": completion},
    )


def _try_answers(pool: Pool, path: str | Path, numbered: Sequence[tuple[int, Example]]) -> None:
    """Raises ValueError unless each answer, as its own completion, is correct."""
    questions = [{"gold": e.answer, "completion": e.answer} for _, e in numbered]
    for (line, example), found in zip(numbered, pool.ask_all(questions), strict=True):
        answer = {"error": str(found)} if isinstance(found, Exception) else found
        if answer.get("reason") != "correct":
            why = answer.get("error", "it does not even equal itself")
            raise ValueError(
                f"{path}:{line}: answer {_short(example.answer)} cannot be checked by math-verify "
                f"({why}): write a number, a formula, or a text that ends in \\boxed{{...}}"
            )


def _examples(path: Path) -> Iterator[tuple[int, Example]]:
    """The examples of a file with the numbers of their lines, which start at 1."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}): give a file of JSON lines"
        ) from error
    for line, row in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if row.strip():
            yield line, _example(row, f"{path}:{line}")


def _example(row: bytes, place: str) -> Example:
    try:
        record = json.loads(row.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: is not UTF-8 ({error.reason}): convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{place}: is not JSON ({error}): write one {{"prompt": ..., "answer": ...}} per line'
        ) from error
    if not isinstance(record, dict):
        raise ValueError(
            f'{place}: holds a {type(record).__name__}: write an object with "prompt" and "answer"'
        )
    return Example(_text(record, "prompt", place), _text(record, "answer", place))


def _text(record: dict[str, object], field: str, place: str) -> str:
    if field not in record:
        known = ", ".join(map(_short, record)) or "nothing"
        raise ValueError(f'{place}: has no field "{field}" (it has {known}): add or rename it')
    value = record[field]
    if field == "answer" and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = str(value)
        except ValueError as error:  # more digits than Python converts
            raise ValueError(f'{place}: field "{field}": {error}: write it as a text') from error
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f'{place}: field "{field}" is {_short(value)}: it must be a text with content'
        )
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(
            f'{place}: field "{field}" has half of a surrogate pair, which is no character: '
            "repair the escape"
        )
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
