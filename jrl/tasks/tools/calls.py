"""Tool calls, independent of the format in which they were written.

The program that renders chat templates loads this file by its path; it therefore imports nothing of
`jrl`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Arguments(dict[str, Any]):
    """Arguments of a call: a mapping for templates that write JSON themselves, and their JSON text
    for templates that insert them into a text."""

    def __init__(self, values: Mapping[str, Any], written: str | None = None):
        super().__init__(values)
        self.written: str = json.dumps(values, ensure_ascii=False) if written is None else written

    def __str__(self) -> str:
        return self.written

    def __add__(self, after: str) -> str:
        return self.written + after

    def __radd__(self, before: str) -> str:
        return before + self.written


ToolParameters = Mapping[str, Mapping[str, Any]]
"""The tools of a task: the JSON schema of their parameters, by name."""


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
      name: name of the tool; empty if it cannot be parsed.
      arguments: by name; empty if they cannot be parsed.
      id: written by the policy; empty if its format has none.
      error: reason why it cannot be parsed, as a message to the policy; else empty.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""


def unreadable_call(reason: str, name: str = "") -> Call:
    """A call that was started and cannot be parsed."""
    return Call(name, error=f"the call cannot be read: {reason}")


def parameters_by_tool(schemas: list[Any]) -> ToolParameters:
    """Parameters of tools by name, from their schemas; schemas that have no name are left out."""
    functions = [schema.get("function", schema) for schema in schemas if isinstance(schema, dict)]
    return {
        each["name"]: each.get("parameters") or {}
        for each in functions
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    }


def message_call(identity: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An item of the "tool_calls" of a message, with OpenAI's fields."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def parse_message_calls(message: Mapping[str, Any]) -> list[Call]:
    """The calls in the "tool_calls" of a message, as `format_message_calls` wrote them."""
    calls = []
    for each in message.get("tool_calls") or ():
        name, arguments = each["function"]["name"], each["function"]["arguments"]
        calls.append(Call(name, arguments, each.get("id", ""), each.get("error", "")))
    return calls


def format_message_calls(calls: list[Call], ids: list[str]) -> list[dict[str, Any]]:
    """The "tool_calls" of a message; a call that cannot be parsed has its "error" too."""
    return [
        message_call(identity, call.name, dict(call.arguments))
        | ({"error": call.error} if call.error else {})
        for call, identity in zip(calls, ids, strict=True)
    ]
