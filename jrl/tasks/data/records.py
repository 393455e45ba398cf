"""Examples from records: what the fields of a line, of a row or of a user's own list may hold.

A record has the texts "prompt" and "answer" (a number will do as an answer), or "messages" in place
of the prompt, the turns of a conversation that a chat template makes the prompt of:
``[{"role": "user", "content": "..."}]``. The three may have other names. All other fields are kept
for rewards.
"""

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jrl.tasks.task import Example

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


class Number(float):
    """A number with a point or an exponent, and how it was written."""

    def __new__(cls, written: str):
        made = super().__new__(cls, written)
        made.written = written
        return made

    written: str


def example_of(
    record: Any, place: str, fields: Fields | None = None, *, answered: bool = False
) -> Example:
    """The example that a record describes.

    Args:
      place: where it is from, for messages.
      fields: names of the fields; None is `Fields()`.
      answered: whether it must have an answer; otherwise that of one without is empty.

    Raises:
      ValueError: where a field is missing or cannot be what it is for.
    """
    fields = Fields() if fields is None else fields
    if not isinstance(record, Mapping):
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
        prompt = readable(messages)
    has_answer = answered or record.get(fields.answer) is not None
    answer = _answer(record, fields.answer, place) if has_answer else ""
    rest = {field: value for field, value in record.items() if field != fields.prompt}
    return Example(prompt, answer, messages, rest)


def check_sendable(example: Example, place: str) -> None:
    """Refuses a record whose fields cannot be sent to the process of a reward.

    Raises:
      ValueError: naming the field.
    """
    for field, value in example.record.items():
        if not isinstance(field, str):
            raise ValueError(f"{place}: field {short(field)} is no text: name it by one")
        try:
            json.dumps(value, default=plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f'{place}: field "{field}" is {short(value)}, which cannot be sent to the '
                f"process of a reward ({error}): leave it out, or make it a text"
            ) from error


def plain(value: Any) -> Any:
    """What JSON holds in place of what it cannot: dates as texts, arrays as lists."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is nothing that JSON holds")


def _value(record: Mapping[str, Any], field: str, place: str) -> Any:
    if field not in record:
        known = ", ".join(map(short, record)) or "nothing"
        raise ValueError(
            f'{place}: has no field "{field}" (it has {known}): add or rename it, or name another '
            "with --prompt-field, --answer-field or --messages-field"
        )
    return record[field]


def _answer(record: Mapping[str, Any], field: str, place: str) -> str:
    """The answer as a text. A number is written with the digits that it has, without exponent."""
    value = _value(record, field, place)
    if hasattr(value, "item"):
        value = value.item()  # of numpy
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
        number = Decimal(value.written) if isinstance(value, Number) else Decimal(repr(value))
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
            f'{place} is {short(value)}: it must be a list of {{"role": ..., "content": ...}}'
        )
    messages = []
    for number, message in enumerate(value, start=1):
        here = f"{place}: message {number}"
        if not isinstance(message, dict):
            raise ValueError(f'{here} is {short(message)}: write "role" and "content"')
        messages.append((_text(message, "role", here), _text(message, "content", here)))
    if messages[-1][0] == "assistant":
        raise ValueError(
            f"{place} ends with the assistant, whose turn the policy is to write: leave it out"
        )
    return tuple(messages)


def readable(messages: Iterable[tuple[str, str]]) -> str:
    """The conversation for people: a single question is itself."""
    said = list(messages)
    if len(said) == 1 and said[0][0] == "user":
        return said[0][1]
    return "\n".join(f"{role}: {content}" for role, content in said)


def _text(record: Mapping[str, Any], field: str, place: str) -> str:
    return checked_text(_value(record, field, place), field, place)


def checked_text(value: Any, field: str, place: str) -> str:
    """The value of a field that must be a text with content.

    Raises:
      ValueError: where it is none.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f'{place}: field "{field}" is {short(value)}: it must be a text with content'
        )
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(
            f'{place}: field "{field}" has half of a surrogate pair, which is no character: '
            "repair the escape"
        )
    return value


def short(value: object) -> str:
    """A value as a message has it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
