"""Messages of a conversation in a request."""

from collections.abc import Mapping
from typing import Any

from jrl.serving.api.errors import invalid_argument
from jrl.tasks.data.fields import short

Message = tuple[str, str]
"""Role and content."""


def messages_of(body: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_argument(
            "messages",
            f'messages={short(messages)} must be a list of {{"role": ..., "content": ...}}.',
        )
    return tuple(_message(f"messages[{index}]", each) for index, each in enumerate(messages))


def _message(path: str, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_argument(
            path, f'{path}={short(message)} must be {{"role": ..., "content": ...}}.'
        )
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, []):
            raise invalid_argument(
                f"{path}.{name}",
                f"{path}.{name}={short(value)} is not supported: leave it out.",
                "unsupported_parameter",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{path}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise invalid_argument(
            f"{path}.content",
            f"{path}.content={short(content)} must be a text, or a list of parts that are.",
        )
    return message["role"], content


def _part(path: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise invalid_argument(
            path,
            f'{path} is of type {short(kind)}: only {{"type": "text", "text": ...}} is supported.',
            "unsupported_parameter",
        )
    if not isinstance(part.get("text"), str):
        raise invalid_argument(path, f"{path}.text={short(part.get('text'))} must be a text.")
    return part["text"]
