"""Calls of tools, read from what a policy wrote.

Checkpoints write them as their chat templates show them:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen and many others
    [TOOL_CALLS][{"name": ..., "arguments": {...}}]              Mistral
    <|python_tag|>{"name": ..., "parameters": {...}}             Llama 3, with or without the tag

A policy without a template writes ``@name text`` as the whole of its turn; the text is the one
argument.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_PLAIN = re.compile(r"@([A-Za-z_]\w*)[ \t]+(.*)", re.DOTALL)
_MISTRAL, _PYTHON_TAG = "[TOOL_CALLS]", "<|python_tag|>"


@dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
      name: of the tool; empty where the call cannot be read.
      arguments: by name, or the one text of a plain call.
    """

    name: str
    arguments: dict[str, Any] | str

    def argument(self, name: str) -> str:
        """An argument as a text.

        Raises:
          ValueError: where there is none.
        """
        if isinstance(self.arguments, str):
            return self.arguments
        if name not in self.arguments:
            raise ValueError(f"the call has no argument {name}")
        value = self.arguments[name]
        return value if isinstance(value, str) else json.dumps(value)


UNREADABLE = Call("", "")
"""Stands for a call that is no JSON of a name and arguments."""


def calls_in(text: str) -> list[Call]:
    """The calls in a turn, in their order; empty where it has none."""
    if found := _TAGGED.findall(text):
        return [_read(part) for part in found]
    if _MISTRAL in text:
        return _several(text.partition(_MISTRAL)[2])
    stripped = text.strip()
    if stripped.startswith(_PYTHON_TAG):
        return [_read(stripped.removeprefix(_PYTHON_TAG))]
    if stripped.startswith("{") and '"name"' in stripped:
        return [_read(stripped)]
    if plain := _PLAIN.fullmatch(stripped):
        return [Call(plain[1], plain[2])]
    return []


def _several(text: str) -> list[Call]:
    try:
        found, _ = json.JSONDecoder().raw_decode(text.strip())
    except (ValueError, RecursionError):
        return [UNREADABLE]
    return [_call(each) for each in found] if isinstance(found, list) else [_call(found)]


def _read(text: str) -> Call:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError):
        return UNREADABLE


def _call(found: Any) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return UNREADABLE
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return UNREADABLE
    return Call(found["name"], arguments) if isinstance(arguments, dict) else UNREADABLE
