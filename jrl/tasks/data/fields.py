"""Fields of a record: their names, and the texts and numbers that they hold."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

MAX_EXPONENT = 300
"""Powers of ten by which a number may be shifted, as a float's may: written out it has as many
digits."""
LIKELY_ANSWERS = (
    *("answer", "completion", "solution", "ground_truth", "final_answer", "expected_answer"),
    *("target", "label", "output", "response"),
)
"""Names of fields that hold the gold answer in public data sets."""
LIKELY_MESSAGES = ("messages", "conversations", "conversation", "chat", "dialog", "turns")
LIKELY_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "text")
OF_PROMPT, OF_ANSWER = ("--prompt-field", "--messages-field"), ("--answer-field",)
"""Flags that name fields."""
LIKELY = {
    "--prompt-field": (LIKELY_PROMPTS, (str, list)),
    "--messages-field": (LIKELY_MESSAGES, (list,)),
    "--answer-field": (LIKELY_ANSWERS, (str, int, float)),
}
"""Names and types of the fields that each of them may mean."""


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a line; with a dot, of a field of a field: ``reward_model.answer``.

    Attributes:
      prompt: of the prompt, a text or the messages of a conversation.
      answer: of the reference answer.
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


class Row(dict[str, Any]):
    """The record of a table, which has every field of every record: those that are null may be
    none of its own."""


def found(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field, None where there is none; a name with a dot is looked for as it is, and
    then as a field of a field."""
    if name in record:
        return _as_list(record[name])
    outer, dot, inner = name.partition(".")
    value = record.get(outer) if dot else None
    return found(value, inner) if isinstance(value, Mapping) else None


def has(record: Mapping[str, Any], name: str) -> bool:
    """True if the record has such a field, null or not."""
    if name in record:
        return True
    outer, dot, inner = name.partition(".")
    value = record.get(outer) if dot else None
    return isinstance(value, Mapping) and has(value, inner)


def needed(
    record: Mapping[str, Any], name: str, place: str, flags: Sequence[str] = OF_PROMPT
) -> Any:
    """The value of a field that there must be, which may be null.

    Args:
      flags: that name such a field.

    Raises:
      ValueError: naming the fields that are there, and the flag that reads another.
    """
    if not has(record, name):
        raise ValueError(
            f'{place}: has no field "{name}" {fields_there(record)}: add or rename it, or name '
            f"another with {instead(record, flags)}"
        )
    return found(record, name)


def needed_answer(record: Mapping[str, Any], name: str, place: str) -> str:
    """The reference answer of a record as a text.

    Raises:
      ValueError: as for `needed` and `answer_text`.
    """
    return answer_text(needed(record, name, place, OF_ANSWER), name, place)


def answer_text(value: Any, field: str, place: str) -> str:
    """An answer as a text. A number is written with the digits that it has, without exponent.

    Raises:
      ValueError: for what is no text with content and no finite number.
    """
    if hasattr(value, "item"):
        value = value.item()  # of numpy
    if isinstance(value, bool) or not isinstance(value, int | float):
        return checked_text(value, field, place)
    try:
        return _written(value)
    except ValueError as error:  # also more digits than Python converts
        raise ValueError(f'{place}: field "{field}": {error}: write it as a text') from error


def checked_text(value: Any, field: str, place: str, *, empty: bool = False) -> str:
    """The value of a field that must be a text.

    Args:
      empty: whether it may be without content.

    Raises:
      ValueError: where it is none.
    """
    if not isinstance(value, str) or not (value.strip() or empty):
        raise ValueError(
            f'{place}: field "{field}" is {short(value)}: it must be a text with content'
        )
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(
            f'{place}: field "{field}" has half of a surrogate pair, which is no character: '
            "repair the escape"
        )
    return value


def from_json(value: Any, field: str, place: str, what: str) -> Any:
    """The value of a field that tables often have as JSON text.

    Args:
      what: to write in its place, for the message.

    Raises:
      ValueError: for a text that is no JSON.
    """
    value = _as_list(value)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{place}: field "{field}" is a text and no JSON ({error}): write {what}'
        ) from error


def fields_there(record: Mapping[str, Any]) -> str:
    """The fields of a record, for a message."""
    return f"(it has {', '.join(map(short, record)) or 'nothing'})"


def instead(record: Mapping[str, Any], flags: Sequence[str]) -> str:
    """The flags that name a field, and the fields of a record that they may mean."""
    perhaps = []
    for flag in flags:
        likely, kinds = LIKELY[flag]
        named = [
            name
            for name, value in _flat(record)
            if name.rpartition(".")[2] in likely and isinstance(value, kinds)
        ]
        perhaps += [f"{flag} {named[0]}"] if named else []
    return " or ".join(flags) + (f", here perhaps {' or '.join(perhaps)}" if perhaps else "")


def short(value: object) -> str:
    """A value as a message has it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value  # of numpy


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


def _flat(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The fields and the fields of fields, with dotted names."""
    for name, value in record.items():
        yield f"{before}{name}", _as_list(value)
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
