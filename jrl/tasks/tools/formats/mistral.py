"""Calls of Mistral's checkpoints, behind ``[TOOL_CALLS]``."""

import re
from collections.abc import Sequence

from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call
from jrl.tasks.tools.formats.format import ParsedCalls, ToolFormat, outside_reasoning, skip_blanks
from jrl.tasks.tools.formats.json_text import make_call, parse_call, read_value, to_json

TAG = "[TOOL_CALLS]"


class Mistral(ToolFormat):
    """Of tokenizers up to version 7, and later ones that keep their form::

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "a1b2c3d4e"}]
    """

    name = "mistral"
    template_markers = (TAG,)
    _opening = re.compile(re.escape(TAG))
    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        return outside_reasoning(text, self._opening, self._read)

    def render(self, calls: Sequence[Call]) -> str:
        bodies = [
            {"name": call.name, "arguments": dict(call.arguments)}
            | ({"id": call.id} if call.id else {})
            for call in calls
        ]
        return TAG + to_json(bodies)

    def _read(self, text: str, opened: re.Match[str]) -> ParsedCalls:
        position = opened.end()
        try:
            if named := self._named.match(text, position):
                arguments, end = read_value(text, named.end())
                return [make_call(named[1], arguments, named[2] or "")], end
            value, end = read_value(text, skip_blanks(text, position))
        except ValueError as error:
            behind = text.find(TAG, position)
            return [unreadable_call(str(error))], len(text) if behind < 0 else behind
        calls = value if isinstance(value, list) else [value]
        return [parse_call(each) for each in calls] or [unreadable_call("its list is empty")], end


class MistralNamed(Mistral):
    """Of tokenizers from version 11 on, with an id in the first of them::

    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}
    [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1, "b": 2}
    """

    name = "mistral-v11"
    template_markers = ("[ARGS]",)

    def render(self, calls: Sequence[Call]) -> str:
        return "".join(f"{TAG}{call.name}[ARGS]{to_json(dict(call.arguments))}" for call in calls)
