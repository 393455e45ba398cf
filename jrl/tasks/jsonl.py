"""Prompts and answers from a file of JSON lines, checked by math-verify.

Each line is an object with the texts "prompt" and "answer" (a number will do as an answer), or with
"messages" in place of the prompt, the turns of a conversation that a chat template makes the prompt
of: ``[{"role": "user", "content": "..."}]``. The three may have other names; other fields are not
read, and blank lines are skipped. How answers are compared is written in
`jrl.tasks.workers.worker`.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jrl.tasks.finite import FiniteTask
from jrl.tasks.task import Example
from jrl.tasks.workers import worker as worker_program
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Worker

# How many answers of a file are tried out when it is loaded; one that cannot be read and lies
# further down gives verdicts with the reason "error".
NUM_TRIED = 1000
# So many at a time: the first that is wrong stops the rest.
TRIED_AT_ONCE = 64


MAX_EXPONENT = 300
"""Powers of ten by which a number may be shifted, as a float's may: written out it has as many
digits."""


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a line.

    Attributes:
      prompt: of the prompt, a text.
      answer: of the gold answer.
      messages: of the conversation, which every line must have; None takes "messages" in lines
        without a prompt.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    messages: str | None = None


class _Number(float):
    """A number with a point or an exponent, and how it was written."""

    def __new__(cls, written: str):
        made = super().__new__(cls, written)
        made.written = written
        return made

    written: str


def jsonl(
    path: str | Path,
    seed: int,
    *,
    fields: Fields | None = None,
    seconds: float = 5.0,
    workers: int | None = None,
) -> FiniteTask:
    """Reads a file of prompts and answers.

    Args:
      path: where the file is.
      seed: picks the order of the training examples.
      fields: names of the fields; None is `Fields()`.
      seconds: how long the comparison of one completion with its answer may take.
      workers: processes that compare; None is one per processor core, up to 8.

    Raises:
      ValueError: the file, a line of it or one of its first answers cannot be read, a prompt occurs
        twice, there are fewer than two examples, or math-verify is not installed.
    """
    if find_spec("math_verify") is None:
        raise ValueError(
            f"task=jsonl:{path} needs math-verify, which is not installed: "
            'run pip install -e ".[math]"'
        )
    numbered = list(_examples(Path(path), Fields() if fields is None else fields))
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


def _examples(path: Path, fields: Fields) -> Iterator[tuple[int, Example]]:
    """The examples of a file with the numbers of their lines, which start at 1."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}): give a file of JSON lines"
        ) from error
    for line, row in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if row.strip():
            yield line, _example(row, f"{path}:{line}", fields)


def _example(row: bytes, place: str, fields: Fields) -> Example:
    try:
        record = json.loads(row.decode("utf-8"), parse_float=_Number)
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
    name = fields.messages
    if name is None and fields.prompt not in record and "messages" in record:
        name = "messages"
    if name is None:
        prompt, messages = _text(record, fields.prompt, place), ()
    else:
        messages = _messages(_value(record, name, place), f'{place}: field "{name}"')
        prompt = _readable(messages)
    return Example(prompt, _answer(record, fields.answer, place), messages)


def _value(record: Mapping[str, Any], field: str, place: str) -> Any:
    if field not in record:
        known = ", ".join(map(_short, record)) or "nothing"
        raise ValueError(
            f'{place}: has no field "{field}" (it has {known}): add or rename it, or name another '
            "with --prompt-field, --answer-field or --messages-field"
        )
    return record[field]


def _answer(record: Mapping[str, Any], field: str, place: str) -> str:
    """The answer as a text. A number is written with the digits that it has, without exponent."""
    value = _value(record, field, place)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text(record, field, place)
    try:
        return _written(value)
    except ValueError as error:  # also more digits than Python converts
        raise ValueError(f'{place}: field "{field}": {error}: write it as a text') from error


def _written(value: int | float) -> str:
    if isinstance(value, int):
        return str(value)
    try:
        number = Decimal(value.written) if isinstance(value, _Number) else Decimal(value)
    except ArithmeticError as error:  # an exponent that not even Decimal has
        raise ValueError(f"{value} is too large or too small") from error
    if not number.is_finite():
        raise ValueError(f"{value} is no number")
    if abs(number.adjusted()) > MAX_EXPONENT:
        raise ValueError(f"{number} is too large or too small")
    return format(number, "f")


def _messages(value: Any, place: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f'{place} is {_short(value)}: it must be a list of {{"role": ..., "content": ...}}'
        )
    messages = []
    for number, message in enumerate(value, start=1):
        here = f"{place}: message {number}"
        if not isinstance(message, dict):
            raise ValueError(f'{here} is {_short(message)}: write "role" and "content"')
        messages.append((_text(message, "role", here), _text(message, "content", here)))
    if messages[-1][0] == "assistant":
        raise ValueError(
            f"{place} ends with the assistant, whose turn the policy is to write: leave it out"
        )
    return tuple(messages)


def _readable(messages: tuple[tuple[str, str], ...]) -> str:
    """The conversation for people: a single question is itself."""
    if len(messages) == 1 and messages[0][0] == "user":
        return messages[0][1]
    return "\n".join(f"{role}: {content}" for role, content in messages)


def _text(record: Mapping[str, Any], field: str, place: str) -> str:
    value = _value(record, field, place)
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
