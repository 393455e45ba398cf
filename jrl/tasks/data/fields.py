"""Fields of a record: their names, and their texts and numbers.

Functions that read a field raise ValueError if it is missing or has the wrong type. The message
names the field and the `location` of the record, its file and line.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np

MAX_EXPONENT = 300
"""Largest decimal exponent of an answer, about a float's, as it is written in digits."""
LIKELY_ANSWERS = (
    *("answer", "completion", "solution", "ground_truth", "final_answer", "expected_answer"),
    *("target", "label", "output", "response"),
)
"""Names of fields that hold the reference answer in public data sets."""
LIKELY_MESSAGES = ("messages", "conversations", "conversation", "chat", "dialog", "turns")
LIKELY_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "text")
PROMPT_NAMES = ("question", "problem", "instruction", "query")
"""Fields that are the prompt of a record with no "prompt" and no conversation (GSM8K, MATH, Alpaca,
MetaMath)."""
CONVERSATION_NAMES = ("messages", "conversations", "conversation")
"""Fields with a conversation, used if there is no prompt."""
TEXT = "text"
"""Field with a text that is trained on as it is."""
PROMPT_FLAGS, ANSWER_FLAGS = ("--prompt-field", "--messages-field"), ("--answer-field",)
"""Flags that name fields."""
LIKELY_FIELDS = {
    "--prompt-field": (LIKELY_PROMPTS, (str, list)),
    "--messages-field": (LIKELY_MESSAGES, (list,)),
    "--answer-field": (LIKELY_ANSWERS, (str, int, float, Decimal)),
}
"""By flag: likely names, and possible types, of the field that it names."""
_ABSENT = object()


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a line; with a dot, of a field of a field: ``reward_model.answer``.

    Attributes:
      prompt: field of the prompt, a text or the messages of a conversation.
      answer: field of the reference answer.
      messages: field of the conversation, which every line must have; None takes "messages" in
        lines that have no prompt.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    messages: str | None = None


class Number(float):
    """A number with a point or an exponent, and how it was written."""

    def __new__(cls, written: str):
        number = super().__new__(cls, written)
        number.written = written
        return number

    written: str


class Row(dict[str, Any]):
    """Record of a table, in which every record has all columns: null may mean an absent field."""


class JsonObject(dict[str, Any]):
    """Object that was decoded from JSON text: a null in it is a value, in tables too."""


def get_field(record: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The value of a field, or the default if there is none. A name with a dot is looked up as it
    is, and then as a nested field."""
    if name in record:
        return to_python(record[name])
    outer, dot, inner = name.partition(".")
    value = record.get(outer) if dot else None
    return get_field(value, inner, default) if isinstance(value, Mapping) else default


def find_prompt(record: Any, fields: Fields | None, location: str) -> Fields:
    """The names of a record's fields, with one of `PROMPT_NAMES` as its prompt if it has no other.

    Raises:
      ValueError: if it has several of them.
    """
    fields = Fields() if fields is None else fields
    others = ("prompt", *CONVERSATION_NAMES, TEXT)
    if fields.prompt != "prompt" or fields.messages is not None or not isinstance(record, Mapping):
        return fields
    if any(get_field(record, name) is not None for name in others):
        return fields
    present = [n for n in PROMPT_NAMES if n != fields.answer and get_field(record, n) is not None]
    if len(present) > 1:
        raise ValueError(
            f"{location}: has {' and '.join(map(short, present))}, and a prompt is one field: name "
            "it with --prompt-field"
        )
    return replace(fields, prompt=present[0]) if present else fields


def require_field(
    record: Mapping[str, Any], name: str, location: str, flags: Sequence[str] = PROMPT_FLAGS
) -> Any:
    """Value of a required field; it may be null. The message names `flags` that select another."""
    value = get_field(record, name, _ABSENT)
    if value is _ABSENT:
        raise ValueError(
            f'{location}: has no field "{name}" {describe_fields(record)}: add or rename it, or '
            f"name another with {suggest_flags(record, flags)}"
        )
    return value


def require_answer(
    record: Mapping[str, Any], name: str, location: str, *, has_prompt: bool = False
) -> str:
    """The reference answer of a record as a text; `has_prompt` is true if its prompt is a text."""
    # Beside a prompt, a conversation may contain the answer: the message names its flag too.
    has_messages = any(get_field(record, field) is not None for field in LIKELY_MESSAGES)
    flags = (*ANSWER_FLAGS, "--messages-field") if has_prompt and has_messages else ANSWER_FLAGS
    return answer_text(require_field(record, name, location, flags), name, location)


def answer_text(value: Any, field: str, location: str) -> str:
    """An answer as a text. A number is written with its own digits, without exponent.

    Raises:
      ValueError: for a value that is neither a text with content nor a number, and for a number
        that is not finite, too large or too small.
    """
    value = to_python(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return check_text(value, field, location)
    try:
        return _format_number(value)
    except ValueError as error:  # also more digits than Python converts
        raise ValueError(f'{location}: field "{field}": {error}: write it as a text') from error


def check_text(value: Any, field: str, location: str, *, empty: bool = False) -> str:
    """The value of a field that must be a text, without halves of surrogate pairs; it may be empty
    if `empty`."""
    if not isinstance(value, str) or not (value.strip() or empty):
        raise ValueError(
            f'{location}: field "{field}" is {short(value)}: it must be a text with content'
        )
    check_characters(value, f'{location}: field "{field}"')
    return value


_SURROGATE = re.compile("[\ud800-\udfff]")


def check_characters(value: Any, where: str) -> None:
    """Rejects half of a surrogate pair in a text, or in any name or text of a JSON value; the
    message begins with `where`, the location of the value."""
    remaining = [value]
    while remaining:
        each = remaining.pop()
        if isinstance(each, Mapping):
            remaining += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            remaining += each
        if isinstance(text := getattr(each, "written", each), str) and _SURROGATE.search(text):
            raise ValueError(
                f"{where} has a lone surrogate, which is not a character: repair the escape"
            )


def from_json(value: Any, field: str, location: str, what: str) -> Any:
    """Value of a field, decoded if it is JSON text, as it often is in tables; None for a blank
    text. The message says to write `what` instead."""
    value = to_python(value)
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value, object_hook=JsonObject)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{location}: field "{field}" is a text that is not JSON ({error}): write {what}'
        ) from error


def describe_fields(record: Mapping[str, Any]) -> str:
    """The fields of a record, for a message."""
    return f"(it has {', '.join(map(short, record)) or 'nothing'})"


def suggest_flags(record: Mapping[str, Any], flags: Sequence[str]) -> str:
    """The flags that name a field, and the fields of a record that they could name."""
    suggestions = []
    for flag in flags:
        likely, kinds = LIKELY_FIELDS[flag]
        candidates = [
            f"{flag} {name}"
            for name, value in _iterate_fields(record)
            if name.rpartition(".")[2] in likely and isinstance(value, kinds)
        ]
        suggestions += candidates[:1]
    hint = f", here perhaps {' or '.join(suggestions)}" if suggestions else ""
    return " or ".join(flags) + hint


def short(value: object) -> str:
    """`repr` of a value for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def to_python(value: Any) -> Any:
    """Converts a NumPy or JAX value to a Python value. A number gets the shortest digits of its
    type: as a Python float, a float32 of 0.1 would be 0.10000000149011612."""
    if not hasattr(value, "tolist"):
        return value
    value = np.asarray(value)[()]
    return Number(str(value)) if isinstance(value, np.floating) else value.tolist()


def _format_number(value: int | float | Decimal) -> str:
    if isinstance(value, int):
        return str(value)
    try:
        number = Decimal(value.written if isinstance(value, Number) else str(value))
    except ArithmeticError as error:  # an exponent that not even Decimal has
        raise ValueError(f"{value} is too large or too small") from error
    if not number.is_finite():
        raise ValueError(f"{value} is not a number")
    if abs(number.adjusted()) > MAX_EXPONENT:
        raise ValueError(f"{number} is too large or too small")
    return format(number, "f")


def _iterate_fields(record: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The fields and the fields of fields, with dotted names."""
    for name, value in record.items():
        yield f"{before}{name}", to_python(value)
        if isinstance(value, Mapping):
            yield from _iterate_fields(value, f"{before}{name}.")
