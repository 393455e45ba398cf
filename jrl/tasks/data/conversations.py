"""Conversations in records: one parser for supervised fine-tuning, RL and environments.

A conversation is a list of messages, ``{"role": ..., "content": ...}``, or ShareGPT's ``{"from":
..., "value": ...}``. Roles are system, developer, user, assistant and tool, and those that a few
templates have in addition (function, ipython, observation). A content is a text, a list of parts
``{"type": "text", "text": ...}``, or null if tool calls or reasoning replace it.
Fields about training decide the loss mask (`jrl.tasks.data.training_fields`). All other fields of a
message are kept for the chat template.

A row of a table has the fields of all its records: a field that is null there is absent. Messages,
tools and the arguments of a call may be JSON text, as OpenAI's clients and `datasets` write them,
in which a null is kept.

Errors are raised as in `jrl.tasks.data.fields`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jrl.tasks.data.fields import JsonObject, Row, check_characters, check_text, from_json, short
from jrl.tasks.data.training_fields import read_trained
from jrl.tasks.tools.calls import Arguments

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = ("function", "ipython", "observation")
"""Roles that some templates use for a tool."""
SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Role of each role name in ShareGPT's records."""
CONTENT_SUBSTITUTES = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields that may replace the content of an assistant's message."""
TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of the parts of a content that are its text."""
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Arguments of a chat template that records and flags may not set."""
LIST = 'a list of {"role": ..., "content": ...}'

Turn = Mapping[str, Any]
"""A message: "role", "content" and any other fields."""


@dataclass(frozen=True)
class Conversation:
    """Messages, tools and arguments that a chat template renders.

    Attributes:
      turns: the messages.
      tools: schemas of the tools that may be called; None without.
      arguments: other variables of the template, for example enable_thinking.
    """

    turns: tuple[Turn, ...]
    tools: list[Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_pairs(cls, pairs: Iterable[Sequence[str]]) -> "Conversation":
        """A conversation of roles and contents."""
        return cls(tuple({"role": role, "content": content} for role, content in pairs))


def content_of(turn: Turn) -> str:
    """The content of a message, empty if it is null."""
    return turn.get("content") or ""


def role_content_pairs(messages: Iterable[Turn]) -> tuple[tuple[str, str], ...]:
    """Role and content of each message."""
    return tuple((turn["role"], content_of(turn)) for turn in messages)


def parse_messages(
    record: Mapping[str, Any], value: Any, name: str, location: str
) -> tuple[Turn, ...]:
    """The messages in a field of a record, from its value and name."""
    where = f'{location}: field "{name}"'
    if not isinstance(value, str) or value.lstrip().startswith("["):
        value = from_json(value, name, location, LIST)
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} is {short(value)}: it must be {LIST}")
    table = isinstance(record, Row)
    return tuple(
        _parse_message(message, table, f"{where}: message {position}")
        for position, message in enumerate(_entries(value, name, location, LIST), start=1)
    )


def tools_of(record: Mapping[str, Any], location: str) -> list[Any] | None:
    """The schemas of the tools of a record, None without."""
    value = from_json(record.get("tools"), "tools", location, "a list of tools")
    if not value:
        return None
    value = _entries(value, "tools", location, "a list of tools")
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError(f'{location}: field "tools" is {short(value)}: write a list of tools')
    value = _drop_nulls(value) if isinstance(record, Row) else value
    check_characters(value, f'{location}: field "tools"')
    return value


def template_arguments_of(record: Mapping[str, Any], location: str) -> dict[str, Any]:
    """The ``chat_template_kwargs`` of a record."""
    name = "chat_template_kwargs"
    value = from_json(record.get(name), name, location, "an object")
    if isinstance(record, Row):
        value = _drop_nulls(value)
    return {} if value is None else checked_arguments(value, f'{location}: field "{name}"')


def template_arguments(text: str | None) -> dict[str, Any]:
    """Chat-template arguments from the JSON text of a flag; none for None."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return checked_arguments(value, f"chat_template_kwargs={text!r}"[:100])


def checked_arguments(value: Any, where: str) -> dict[str, Any]:
    """Validates the arguments of a chat template.

    Raises:
      ValueError: if they are not an object, or one has a reserved name; the message begins with
        `where` they are from.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f'{where} is not a JSON object: write one, {{"enable_thinking": false}}')
    for name in value:
        if name in RESERVED:
            raise ValueError(
                f"{where} has {name!r}, which is not a variable of the template: leave it out"
            )
    check_characters(value, where)
    return dict(value)


def _parse_message(turn: Any, table: bool, location: str) -> Turn:
    if not isinstance(turn, Mapping):
        raise ValueError(f'{location} is {short(turn)}: write "role" and "content"')
    # A null is dropped in JSON lines too, which are mostly exports of tables.
    message = {
        name: _drop_nulls(value) if table else value
        for name, value in turn.items()
        if value is not None or name == "content"
    }
    message = read_trained(_convert_sharegpt(message, location), location)
    if message["role"] not in (*ROLES, *OTHER_ROLES):
        raise ValueError(
            f"{location}: role is {short(message['role'])}: it must be one of {', '.join(ROLES)}"
        )
    calls = from_json(message.pop("tool_calls", None), "tool_calls", location, "a list of calls")
    if calls := _entries(calls, "tool_calls", location, "a list of calls"):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError(
                f'{location}: field "tool_calls" is {short(calls)}: write a list of calls'
            )
        message["tool_calls"] = [_parse_call(call, location) for call in calls]
    message["content"] = _parse_content(message, location)
    for name, value in message.items():
        check_characters([name, value], f"{location}: field {json.dumps(name)}")
    return message


def _convert_sharegpt(turn: dict[str, Any], location: str) -> dict[str, Any]:
    """Renames ShareGPT's fields of a message to "role" and "content"."""
    if "role" in turn or "from" not in turn:
        return {"role": None, **turn}
    message = {
        "role": SHAREGPT.get(str(turn["from"]).lower(), turn["from"]),
        "content": turn.get("value"),
        **{name: value for name, value in turn.items() if name not in ("from", "value")},
    }
    if turn["from"] == "function_call":
        call = from_json(message["content"], "value", location, "the call as JSON")
        message |= {"content": None, "tool_calls": call if isinstance(call, list) else [call]}
    return message


def _parse_content(turn: Mapping[str, Any], location: str) -> str | None:
    """The text of a message; None if tool calls or reasoning replace it."""
    value, of_policy = turn.get("content"), turn["role"] == "assistant"
    replaced = of_policy and any(map(turn.get, CONTENT_SUBSTITUTES))
    if value is None and replaced:
        return None
    if "content" not in turn:
        names = ", ".join(map(repr, (name for name in turn if turn[name] is not None)))
        raise ValueError(f'{location}: has no field "content" (it has {names}): write a text')
    if isinstance(value, list) and value:
        parts = _entries(value, "content", location, "a text", only='{"type"')
        value = "".join(
            _parse_content_item(part, f"{location}: part {n}")
            for n, part in enumerate(parts, start=1)
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = getattr(value, "written", str(value))
    # Empty content is allowed for system prompts, tool outputs, and beside calls or reasoning.
    empty = replaced if of_policy else turn["role"] != "user"
    return check_text(value, "content", location, empty=empty)


def _parse_content_item(part: Any, location: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") or "text" if isinstance(part, Mapping) else part
    if kind in TEXT_TYPES and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(
        f'{location} of "content" is {short(kind)}: it must be {{"type": "text", "text": ...}};'
        " images and sounds are not read"
    )


def _parse_call(call: Mapping[str, Any], location: str) -> dict[str, Any]:
    """A call whose arguments are a mapping, whether it has a field "function" or not."""
    parsed = dict(call)
    if isinstance(function := parsed.get("function"), str) and function.startswith("{"):
        parsed["function"] = from_json(function, "function", location, "an object")
    if isinstance(parsed.get("function"), Mapping):
        parsed["function"] = _parse_call(parsed["function"], location)
    arguments = parsed.get("arguments")
    if isinstance(arguments, str) and not arguments.strip():
        parsed["arguments"] = Arguments({})
    elif isinstance(arguments, str):
        mapping = from_json(arguments, "arguments", location, "an object")
        if isinstance(mapping, Mapping):
            parsed["arguments"] = Arguments(mapping, arguments)
    elif isinstance(arguments, Mapping):
        parsed["arguments"] = Arguments(arguments)
    return parsed


def _entries(value: Any, name: str, location: str, what: str, only: str = "{") -> Any:
    """The value of a field; if it is a list, entries that are JSON text, as of the type Json of
    `datasets`, are decoded. Those begin with the text `only`."""
    if not isinstance(value, list):
        return value
    return [
        from_json(each, name, location, what)
        if isinstance(each, str) and each.replace(" ", "").startswith(only)
        else each
        for each in value
    ]


def _drop_nulls(value: Any) -> Any:
    """The value without null fields at any depth; entries of lists and JSON text stay."""
    if isinstance(value, JsonObject):
        return value
    if isinstance(value, Mapping):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_drop_nulls(each) for each in value]
    return value
