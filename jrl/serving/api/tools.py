"""Tools of a request, their tool choice, and the JSON schema of its response."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jrl.serving.api.fields import boolean, invalid_argument, invalid_value
from jrl.tasks.data.fields import short
from jrl.tasks.tools.call_format import ToolParameters
from jrl.tasks.tools.calls import parameters_by_tool

MAX_TOOLS = 128
TOOL_ARGUMENTS = ("tools", "tool_choice", "parallel_tool_calls")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = '"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
SHAPE = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""Schema of `json_object`."""
SHAPES = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
    '{"name": ..., "schema": {...}}}'
)


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request.

    Attributes:
      schemas: of the tools, in the form for chat templates.
      choice: "none" returns calls as text, "auto" leaves it to the model whether to call, and with
        "required" it calls at least one.
      name: the tool that must be called; None is any.
      parallel: true if a response may have more than one call.
    """

    schemas: tuple[Mapping[str, Any], ...]
    choice: Literal["none", "auto", "required"]
    name: str | None = None
    parallel: bool = True

    @property
    def texts(self) -> tuple[str, ...]:
        """The schemas as JSON texts."""
        return tuple(json.dumps(schema, ensure_ascii=False) for schema in self.schemas)

    @property
    def parameters(self) -> ToolParameters:
        """JSON schema of the parameters of each tool, by its name."""
        return parameters_by_tool(list(self.schemas))


def tools_of(body: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a request, or None; raises ApiError for an invalid tool, and for a
    choice that is not among them."""
    tools, parallel = body.get("tools") or [], body.get("parallel_tool_calls")
    boolean(body, "parallel_tool_calls")
    if not isinstance(tools, list):
        raise invalid_value("tools", tools, f"a list of {SHAPE}")
    if len(tools) > MAX_TOOLS:
        raise invalid_argument("tools", f"tools has {len(tools)} tools: give {MAX_TOOLS} at most.")
    names = [_check_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid_argument(
                f"tools[{index}]", f"tools has two of the name {name!r}: give each its own."
            )
    choice, name = _choice(body.get("tool_choice"), names)
    if not tools:
        return None
    return ToolUse(tuple(tools), choice, name, parallel is not False)


def _check_tool(path: str, tool: Any) -> str:
    """The name of a tool."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise invalid_value(path, tool, SHAPE)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        rule = "up to 64 letters, digits, dots, - and _"
        raise invalid_value(f"{path}.function.name", name, rule)
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid_value(f"{path}.function.parameters", parameters, "a JSON schema")
    return name


def _choice(value: Any, names: list[str]) -> tuple[Literal["none", "auto", "required"], str | None]:
    """Choice and name of a tool that must be called."""
    if value is None or value in ("none", "auto"):
        return ("none" if value == "none" else "auto"), None
    if not names:
        raise invalid_argument(
            "tool_choice", f"tool_choice={short(value)} needs tools: give some, or leave it out."
        )
    if value == "required":
        return "required", None
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or value.get("type") != "function" or name not in names:
        raise invalid_value("tool_choice", value, f"{CHOICES} with one of {', '.join(names)}")
    return "required", name


def response_schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """JSON schema of the response, None for any text; raises ApiError for an unknown format, and
    for a schema that is not an object."""
    value = body.get("response_format")
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return ANY_OBJECT
    stated = value.get("json_schema") if isinstance(value, dict) else None
    if not isinstance(stated, dict) or value.get("type") != "json_schema":
        raise invalid_value("response_format", value, SHAPES)
    schema = stated.get("schema")
    if not isinstance(schema, dict):
        raise invalid_value("response_format.json_schema.schema", schema, "a JSON schema")
    return schema
