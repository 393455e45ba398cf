"""Requests of ``/v1/responses``, rewritten as requests of a chat."""

from collections.abc import Mapping
from typing import Any

from jrl.serving.api.fields import integer, invalid_argument, invalid_value
from jrl.serving.api.messages import check_message, joined_content
from jrl.tasks.data.fields import short

RENAMED = {"max_output_tokens": "max_tokens"}
"""Argument of a chat by the argument of a response."""
TRANSLATED = ("input", "instructions", "tools", "tool_choice", "text", "reasoning", "include")
NEUTRAL = {
    "background": (False,),
    "store": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Unsupported arguments with the values that change nothing; reasoning is never encrypted."""
CHAT_ONLY = (
    *("messages", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs"),
    *("response_format", "reasoning_effort", "return_token_ids", "return_tokens_as_token_ids"),
    *("prompt_logprobs", "add_generation_prompt", "continue_final_message"),
)
"""Arguments of a chat that a response does not have."""
REPEATED = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
}
"""Arguments that a response repeats, with their defaults."""
LABELS = ("id", "status", "type", "phase")
"""Fields of items that change no prompt."""
FIELDS = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary", "encrypted_content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "name", "output"),
}
"""Supported fields of items by their type."""
ITEM = 'a message, or an item of type "function_call", "function_call_output" or "reasoning"'


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Body of the chat that a response asks for; raises ApiError for what a chat does not have."""
    chat = dict[str, Any]()
    for name, value in body.items():
        if value is None or value in NEUTRAL.get(name, ()):
            continue
        if name in NEUTRAL or name in CHAT_ONLY:
            raise invalid_argument(
                name, f"{name}={short(value)} is not supported: leave it out.", "unknown_parameter"
            )
        if name not in TRANSLATED:
            chat[RENAMED.get(name, name)] = value
    integer(body, "max_output_tokens", 1, None)
    chat["messages"] = _messages(body)
    tools = body.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise invalid_value("tools", tools, "a list of functions")
        chat["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    if (choice := body.get("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    if (format := _object(body, "text", {"verbosity": "medium"}, "format")) is not None:
        chat["response_format"] = _format(format)
    effort = _object(body, "reasoning", {"summary": "auto", "generate_summary": "auto"}, "effort")
    return chat if effort is None else {**chat, "reasoning_effort": effort}


def repeated_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a request that its response repeats."""
    return {n: d if body.get(n) is None else body[n] for n, d in REPEATED.items()}


def _object(body: Mapping[str, Any], name: str, neutral: Mapping[str, str], read: str) -> Any:
    """The member `read` of an object whose other members must be neutral; None if it is absent."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid_value(name, value, "an object")
    for key, member in value.items():
        if key != read and member not in (None, neutral.get(key)):
            raise invalid_argument(
                f"{name}.{key}",
                f"{name}.{key}={short(member)} is not supported: leave it out.",
                "unsupported_parameter",
            )
    return value.get(read)


def _tool(path: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise invalid_value(path, tool, '{"type": "function", "name": ..., "parameters": {...}}')
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(format: Any) -> Any:
    if not isinstance(format, dict) or format.get("type") != "json_schema":
        return format
    if not isinstance(format.get("schema"), dict):
        raise invalid_value("text.format.schema", format.get("schema"), "a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": format["schema"]}}


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages of the items of an input."""
    instructions, items = body.get("instructions"), body.get("input")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid_value("instructions", instructions, "a text")
    conversation = _Messages()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise invalid_value("input", items, f"a text, or a list of items, each {ITEM}")
    for index, item in enumerate(items):
        conversation.add(f"input[{index}]", item)
    return conversation.messages


class _Messages:
    """Messages of items; reasoning, message and calls of one turn are one message."""

    def __init__(self):
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def add(self, path: str, item: Any) -> None:
        """Adds an item; raises ApiError for an invalid one."""
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            raise invalid_value(path, item, ITEM)
        fields = {n: v for n, v in item.items() if n not in LABELS and v is not None}
        for name, value in fields.items():
            if name not in FIELDS[kind]:
                raise invalid_argument(
                    f"{path}.{name}",
                    f"{path}.{name}={short(value)} is not supported: leave it out.",
                    "unsupported_parameter",
                )
        if kind == "message":
            check_message(path, fields)
            if fields["role"] == "assistant":
                self._turn("content", "tool_calls")["content"] = fields.get("content")
            else:
                self.messages.append(fields)
        elif kind == "reasoning":
            turn = self._turn("reasoning_content", "content", "tool_calls")
            turn["reasoning_content"] = _reasoning(path, fields)
        elif kind == "function_call":
            self._add_call(path, fields)
        else:
            self._add_output(path, fields)

    def _turn(self, *absent: str) -> dict[str, Any]:
        """The assistant's turn at the end that has none of these fields, or a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in absent):
            self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]

    def _add_call(self, path: str, fields: Mapping[str, Any]) -> None:
        identity = _identity(path, fields)
        function = {"name": fields.get("name"), "arguments": fields.get("arguments")}
        call = {"id": identity, "type": "function", "function": function}
        check_message(path, {"role": "assistant", "tool_calls": [call]})
        self._names[identity] = str(function["name"])
        self._turn().setdefault("tool_calls", []).append(call)

    def _add_output(self, path: str, fields: Mapping[str, Any]) -> None:
        identity = _identity(path, fields)
        content = joined_content(f"{path}.output", fields.get("output"))
        message = {"role": "tool", "content": content, "tool_call_id": identity}
        name = fields.get("name") or self._names.get(identity)
        self.messages.append(message if name is None else {**message, "name": name})


def _identity(path: str, fields: Mapping[str, Any]) -> str:
    identity = fields.get("call_id")
    if not isinstance(identity, str):
        raise invalid_value(f"{path}.call_id", identity, "a text")
    return identity


def _reasoning(path: str, fields: Mapping[str, Any]) -> str:
    """Text of an item of reasoning, or of its summary if it has none."""
    for name in ("content", "summary"):
        if content := fields.get(name):
            return joined_content(f"{path}.{name}", content, ("reasoning_text", "summary_text"))
    raise invalid_argument(
        path, f"{path} is reasoning that has no text, perhaps an encrypted one: leave it out."
    )
