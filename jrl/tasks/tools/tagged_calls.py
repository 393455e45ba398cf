"""Tool calls in ``<tool_call>`` tags: JSON, GLM's keys and values, Qwen3-Coder's parameters."""

import re
from collections.abc import Sequence
from typing import Any

from jrl.tasks.tools.call_format import (
    MarkedFormat,
    ParsedCalls,
    find_mark,
    parse_call,
    read_value,
    skip_blanks,
    skip_unreadable,
    to_json,
)
from jrl.tasks.tools.calls import Call, ToolParameters
from jrl.tasks.tools.schema import parse_argument

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_NAME_LENGTH = 256
"""Most characters of the name of an argument."""


class Hermes(MarkedFormat):
    """Format of Hermes, Qwen 2.5 and 3, SmolLM3 and many others::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
    """

    name = "hermes"
    template_markers = (OPEN,)
    _opening = re.compile(re.escape(OPEN))

    def render(self, calls: Sequence[Call]) -> str:
        bodies = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
        return "\n".join(f"{OPEN}\n{to_json(body)}\n{CLOSE}" for body in bodies)

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        position = skip_blanks(text, opened.end())
        if not text.startswith("{", position):
            return skip_unreadable(
                text, opened, CLOSE, "it is no JSON object with a name and arguments"
            )
        try:
            value, end = read_value(text, position)
        except ValueError as error:
            return skip_unreadable(text, opened, CLOSE, str(error))
        end = skip_blanks(text, end)
        if text.startswith(CLOSE, end):
            return [parse_call(value)], end + len(CLOSE)
        if end == len(text) or text.startswith(OPEN, end):
            # The end of the turn, or the next call, closes it as well.
            return [parse_call(value)], end
        return skip_unreadable(text, opened, CLOSE, "something stands behind its JSON object")


class Glm(MarkedFormat):
    """Format of GLM-4.5 and later versions; texts have no quotes::

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>
    """

    name = "glm"
    template_markers = ("<arg_key>",)
    _opening = re.compile(re.escape(OPEN))
    _name = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>|$)")
    _pair_head = re.compile(rf"\s*<arg_key>([^<]{{0,{MAX_NAME_LENGTH}}})</arg_key>\s*<arg_value>")
    _pair_end = "</arg_value>"
    _written_pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        if (name := self._name.match(text, opened.end())) is None:
            return skip_unreadable(text, opened, CLOSE, "no name of a tool stands in it")
        pairs, position = _read_pairs(self._pair_head, self._pair_end, text, name.end())
        arguments = _parse_arguments(pairs, name[1], tools)
        position = skip_blanks(text, position)
        # A call that is not closed may be incomplete.
        if text.startswith(CLOSE, position):
            return [Call(name[1], arguments)], position + len(CLOSE)
        reason = "it is not made of arg_key and arg_value"
        return skip_unreadable(text, opened, CLOSE, reason, position)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f"{OPEN}{call.name}\n{_format_arguments(self._written_pair, call)}{CLOSE}"
            for call in calls
        )


class QwenCoder(MarkedFormat):
    """Format of Qwen3-Coder and Qwen3.5; texts have no quotes::

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>
    """

    name = "qwen-coder"
    template_markers = ("<function=",)
    _opening = re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>")
    _name = re.compile(r"([\w.-]+)>")
    _pair_head = re.compile(rf"\s*<parameter=([^>\n]{{1,{MAX_NAME_LENGTH}}})>(?:\r?\n)?")
    _pair_end = "</parameter>"
    _written_pair = "<parameter={}>\n{}\n</parameter>\n"
    _close = re.compile(r"\s*</function>(?:\s*</tool_call>)?")

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        name = self._name.match(text, opened.end()) if opened[0] != OPEN else None
        if name is None:
            return skip_unreadable(text, opened, CLOSE, "no function=NAME stands in it")
        pairs, position = _read_pairs(self._pair_head, self._pair_end, text, name.end())
        pairs = [(key, re.sub(r"\r?\n\Z", "", value)) for key, value in pairs]
        arguments = _parse_arguments(pairs, name[1], tools)
        if closed := self._close.match(text, position):
            return [Call(name[1], arguments)], closed.end()
        return skip_unreadable(text, opened, CLOSE, "it is not made of parameters", position)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f"{OPEN}\n<function={call.name}>\n{_format_arguments(self._written_pair, call)}"
            f"</function>\n{CLOSE}"
            for call in calls
        )


def _format_arguments(pair: str, call: Call) -> str:
    """The arguments of a call, each as a pair of name and value."""
    values = call.arguments.items()
    return "".join(pair.format(n, v if isinstance(v, str) else to_json(v)) for n, v in values)


def _read_pairs(
    head: re.Pattern[str], end: str, text: str, position: int
) -> tuple[list[tuple[str, str]], int]:
    """Names and texts of the arguments from a position on, and the position after them. Each begins
    with a match of `head` and ends with the mark `end`."""
    pairs: list[tuple[str, str]] = []
    while match := head.match(text, position):
        end_of_value = find_mark(text, end, match.end())
        if end_of_value < 0:
            break
        pairs.append((match[1].strip(), text[match.end() : end_of_value]))
        position = end_of_value + len(end)
    return pairs, position


def _parse_arguments(
    pairs: Sequence[tuple[str, str]], name: str, tools: ToolParameters
) -> dict[str, Any]:
    """The arguments of a call of this tool, from their names and texts."""
    properties = tools.get(name, {}).get("properties") or {}
    return {key: parse_argument(value, properties.get(key)) for key, value in pairs}
