"""Calls of Mistral's checkpoints, behind ``[TOOL_CALLS]``."""

import re
from collections.abc import Sequence

from jrl.tasks.tools.calls import Call, Known, unreadable
from jrl.tasks.tools.formats.format import Read, ToolFormat, outside_reasoning, skip_blanks
from jrl.tasks.tools.formats.json_text import arguments_of, call_of, read_value, written

TAG = "[TOOL_CALLS]"


class Mistral(ToolFormat):
    """Of tokenizers up to version 7, and later ones that keep their form::

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "a1b2c3d4e"}]
    """

    name = "mistral"
    marks = (TAG,)
    _opening = re.compile(re.escape(TAG))
    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def calls(self, text: str, known: Known) -> list[Call]:
        return outside_reasoning(text, self._opening, self._read)

    def render(self, calls: Sequence[Call]) -> str:
        bodies = [
            {"name": call.name, "arguments": dict(call.arguments)}
            | ({"id": call.id} if call.id else {})
            for call in calls
        ]
        return TAG + written(bodies)

    def _read(self, text: str, opened: re.Match[str]) -> Read:
        place = opened.end()
        try:
            if named := self._named.match(text, place):
                given, end = read_value(text, named.end())
                return [arguments_of(named[1], given, named[2] or "")], end
            found, end = read_value(text, skip_blanks(text, place))
        except ValueError as error:
            behind = text.find(TAG, place)
            return [unreadable(str(error))], len(text) if behind < 0 else behind
        calls = found if isinstance(found, list) else [found]
        return [call_of(each) for each in calls] or [unreadable("its list is empty")], end


class MistralNamed(Mistral):
    """Of tokenizers from version 11 on, with an id in the first of them::

    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}
    [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1, "b": 2}
    """

    name = "mistral-v11"
    marks = ("[ARGS]",)

    def render(self, calls: Sequence[Call]) -> str:
        return "".join(f"{TAG}{call.name}[ARGS]{written(dict(call.arguments))}" for call in calls)
