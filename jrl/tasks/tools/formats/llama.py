"""Calls of Llama 3: a JSON object that is the whole turn, or what follows ``<|python_tag|>``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.tools.calls import Call, Known, unreadable
from jrl.tasks.tools.formats.format import Read, ToolFormat, outside_reasoning, skip_blanks
from jrl.tasks.tools.formats.json_text import call_of, read_value, written
from jrl.tasks.tools.formats.literals import Literals
from jrl.tasks.tools.formats.pythonic import arguments_in

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
    marks = ('function name, "parameters"', r"function name, \"parameters\"", TAG)
    _opening = re.compile(re.escape(TAG) + r"|^[ \t]*(?=\{)", re.MULTILINE)
    _begun = re.compile(r'\{\s*"name"\s*:\s*"([^"\n]*)"\s*,\s*"(?:parameters|arguments)"\s*:')
    _builtin = re.compile(r"\s*([A-Za-z_]\w*)\.call\s*\(")
    _joint = re.compile(r"\s*;?\s*")
    _end = re.compile(r"\s*(?:<\|eo[mt]_id\|>\s*)*")

    def calls(self, text: str, known: Known) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> Read:
            if opened[0] == TAG:
                return self._tagged(text, opened.end(), known)
            return self._bare(text, opened.end(), known)

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        bodies = ({"name": call.name, "parameters": dict(call.arguments)} for call in calls)
        return "; ".join(map(written, bodies))

    def _tagged(self, text: str, place: int, known: Known) -> Read:
        if builtin := self._builtin.match(text, place):
            literals = Literals(text, builtin.end())
            try:
                return [Call(builtin[1], arguments_in(literals, builtin[1], known))], literals.place
            except ValueError as error:
                return [unreadable(str(error), builtin[1])], len(text)
        try:
            found, end = self._objects(text, skip_blanks(text, place))
        except ValueError as error:
            return [unreadable(str(error))], len(text)
        return [call_of(each) for each in found], end

    def _bare(self, text: str, place: int, known: Known) -> Read:
        try:
            found, end = self._objects(text, place)
        except ValueError as error:
            begun = self._begun.match(text, place)
            if begun is None or begun[1] not in known:
                return [], place + 1
            return [unreadable(str(error), begun[1])], len(text)
        whole = self._end.match(text, end)
        if whole is None or whole.end() < len(text) or not all(_is_call(x, known) for x in found):
            return [], end
        return [call_of(each) for each in found], len(text)

    def _objects(self, text: str, place: int) -> tuple[list[Any], int]:
        """JSON values one after the other, with or without a semicolon between."""
        value, end = read_value(text, place)
        found = [value]
        while (joint := self._joint.match(text, end)) and text.startswith("{", joint.end()):
            value, end = read_value(text, joint.end())
            found.append(value)
        return found, end


def _is_call(found: Any, known: Known) -> bool:
    if not isinstance(found, Mapping) or found.get("name") not in known:
        return False
    return any(isinstance(found.get(name), Mapping) for name in ("parameters", "arguments"))
