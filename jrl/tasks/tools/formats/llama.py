"""Calls of Llama 3: a JSON object that is the whole turn, or what follows ``<|python_tag|>``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call
from jrl.tasks.tools.formats.format import ParsedCalls, ToolFormat, outside_reasoning, skip_blanks
from jrl.tasks.tools.formats.json_text import parse_call, read_value, to_json
from jrl.tasks.tools.formats.literals import Literals
from jrl.tasks.tools.formats.pythonic import read_arguments

TAG = "<|python_tag|>"


class Llama(ToolFormat):
    """Of Llama 3.1 to 3.3::

        {"name": "add", "parameters": {"a": 1, "b": 2}}
        <|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}
        <|python_tag|>add.call(a=1, b=2)

    Without the tag an object is a call where a tool has its name, its parameters are an object, and
    nothing but calls follows: other JSON is an answer.
    """

    name = "llama"
    template_markers = ('function name, "parameters"', r"function name, \"parameters\"", TAG)
    _opening = re.compile(re.escape(TAG) + r"|^[ \t]*(?=\{)", re.MULTILINE)
    _call_start = re.compile(r'\{\s*"name"\s*:\s*"([^"\n]*)"\s*,\s*"(?:parameters|arguments)"\s*:')
    _builtin = re.compile(r"\s*([A-Za-z_]\w*)\.call\s*\(")
    _joint = re.compile(r"\s*;?\s*")
    _end = re.compile(r"\s*(?:<\|eo[mt]_id\|>\s*)*")

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> ParsedCalls:
            if opened[0] == TAG:
                return self._read_tagged(text, opened.end(), tools)
            return self._read_bare(text, opened.end(), tools)

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        bodies = ({"name": call.name, "parameters": dict(call.arguments)} for call in calls)
        return "; ".join(map(to_json, bodies))

    def _read_tagged(self, text: str, position: int, tools: ToolParameters) -> ParsedCalls:
        if builtin := self._builtin.match(text, position):
            literals = Literals(text, builtin.end())
            try:
                return [
                    Call(builtin[1], read_arguments(literals, builtin[1], tools))
                ], literals.position
            except ValueError as error:
                return [unreadable_call(str(error), builtin[1])], len(text)
        try:
            values, end = self._read_objects(text, skip_blanks(text, position))
        except ValueError as error:
            return [unreadable_call(str(error))], len(text)
        return [parse_call(each) for each in values], end

    def _read_bare(self, text: str, position: int, tools: ToolParameters) -> ParsedCalls:
        try:
            values, end = self._read_objects(text, position)
        except ValueError as error:
            start = self._call_start.match(text, position)
            if start is None or start[1] not in tools:
                return [], position + 1
            return [unreadable_call(str(error), start[1])], len(text)
        turn_end = self._end.match(text, end)
        if (
            turn_end is None
            or turn_end.end() < len(text)
            or not all(_is_call(x, tools) for x in values)
        ):
            return [], end
        return [parse_call(each) for each in values], len(text)

    def _read_objects(self, text: str, position: int) -> tuple[list[Any], int]:
        """JSON values one after the other, with or without a semicolon between."""
        value, end = read_value(text, position)
        values = [value]
        while (joint := self._joint.match(text, end)) and text.startswith("{", joint.end()):
            value, end = read_value(text, joint.end())
            values.append(value)
        return values, end


def _is_call(value: Any, tools: ToolParameters) -> bool:
    if not isinstance(value, Mapping) or value.get("name") not in tools:
        return False
    return any(isinstance(value.get(name), Mapping) for name in ("parameters", "arguments"))
