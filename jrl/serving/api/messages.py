"""Messages of a conversation in a request, with tool calls and their results."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.serving.api.fields import invalid_argument, invalid_value
from jrl.tasks.data.conversations import CONTENT_SUBSTITUTES, TEXT_TYPES, Turn
from jrl.tasks.data.fields import short
from jrl.tasks.tools.calls import Arguments

MESSAGE = '{"role": ..., "content": ...}'
CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""Fields of a message that are passed to the chat template as they are."""
LABELS = ("id", "annotations", "index", "status", "cache_control", "provider_specific_fields")
"""Fields of messages in responses of servers, which no template writes: they are ignored."""
DETAIL_TEXTS = {"reasoning.text": "text", "reasoning.summary": "summary"}
"""Field with the text of an item of `reasoning_details`, by the type of the item."""
UNREAD_ARGUMENTS = "arguments"
"""Name of the only argument of a call whose arguments are not a JSON object: it is their text."""


def messages_of(body: Mapping[str, Any]) -> tuple[Turn, ...]:
    """The messages of a request in the form for chat templates; raises ApiError for an invalid
    message and for unsupported fields."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_value("messages", messages, f"a list of {MESSAGE}")
    return tuple(check_message(f"messages[{index}]", each) for index, each in enumerate(messages))


def check_message(path: str, message: Any) -> Turn:
    """A message in the form for chat templates."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_value(path, message, MESSAGE)
    turn: dict[str, Any] = {"role": message["role"], "content": None}
    refusal = None
    for name, value in message.items():
        if name in turn or name in LABELS or value in (None, []):
            continue
        if name == "tool_calls":
            turn[name] = _calls(f"{path}.{name}", value)
        elif name == "reasoning_details":
            reasoning = _reasoning(f"{path}.{name}", value)
            if reasoning and not any(message.get(n) for n in ("reasoning_content", "reasoning")):
                turn["reasoning_content"] = reasoning
        elif name == "refusal" and (not value or not message.get("content")):
            refusal = value
        elif name not in TEXT_FIELDS:
            raise invalid_argument(
                f"{path}.{name}",
                f"{path}.{name}={short(value)} is not supported: leave it out.",
                "unsupported_parameter",
            )
        elif not isinstance(value, str):
            raise invalid_value(f"{path}.{name}", value, "a text")
        else:
            turn[name] = value
    # A refusal is what the assistant said in place of a content.
    content = message.get("content") or refusal or message.get("content")
    if isinstance(content, list):
        content = joined_content(f"{path}.content", content)
    replaced = turn["role"] == "assistant" and any(map(turn.get, CONTENT_SUBSTITUTES))
    if not isinstance(content, str) and not (content is None and replaced):
        raise invalid_value(f"{path}.content", content, "a text, or a list of parts that are")
    return {**turn, "content": content}


def joined_content(path: str, content: Any, types: Sequence[str] = TEXT_TYPES) -> str:
    """The text of a content, which is a text or a list of parts of these types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_value(path, content, "a text, or a list of parts that are")
    return "".join(_part(f"{path}[{i}]", part, types) for i, part in enumerate(content))


def _part(path: str, part: Any, types: Sequence[str]) -> str:
    if not isinstance(part, dict) or part.get("type") not in types:
        kind = part.get("type") if isinstance(part, dict) else part
        raise invalid_argument(
            path,
            f'{path} is of type {short(kind)}: only {{"type": "{types[0]}", "text": ...}} is '
            "supported.",
            "unsupported_parameter",
        )
    if not isinstance(part.get("text"), str):
        raise invalid_argument(path, f"{path}.text={short(part.get('text'))} must be a text.")
    return part["text"]


def _reasoning(path: str, details: Any) -> str:
    """The text of `reasoning_details`; items without a text, such as encrypted ones, have none for
    a template."""
    if not isinstance(details, list) or not all(isinstance(each, dict) for each in details):
        raise invalid_value(path, details, "a list of objects")
    texts = [each.get(DETAIL_TEXTS.get(str(each.get("type")), "")) or "" for each in details]
    if not all(isinstance(text, str) for text in texts):
        raise invalid_value(path, details, "a list of objects whose text is a text")
    return "".join(texts)


def _calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid_value(path, calls, "a list of calls")
    return [_call(f"{path}[{index}]", call) for index, call in enumerate(calls)]


def _call(path: str, call: Any) -> dict[str, Any]:
    """A call whose arguments are a mapping, and JSON text for templates that need text.

    Arguments that are not a JSON object, as of an answer that was cut off, are a text.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_value(path, call, CALL)
    written = function.get("arguments") or "{}"
    arguments = written
    if isinstance(written, str):
        try:
            arguments = json.loads(written)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {UNREAD_ARGUMENTS: written}
    if not isinstance(arguments, dict):
        raise invalid_value(f"{path}.function.arguments", written, "a JSON object, or a text")
    wrapped = Arguments(arguments, written if isinstance(written, str) else None)
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **identity,
        "type": "function",
        "function": {"name": function["name"], "arguments": wrapped},
    }
