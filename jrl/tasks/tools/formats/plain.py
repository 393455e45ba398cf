"""Calls of a policy without a chat template: ``@name text`` as the whole of its turn."""

import re
from collections.abc import Sequence

from jrl.tasks.tools.calls import Call, ToolParameters
from jrl.tasks.tools.formats.format import ToolFormat
from jrl.tasks.tools.formats.json_text import make_call, to_json


class Plain(ToolFormat):
    """The text is the one argument of a tool that needs one, and an object of them in JSON for
    another."""

    name = "plain"
    template_markers = ()
    _call = re.compile(r"@([A-Za-z_]\w*)[ \t]+(.*)", re.DOTALL)

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        match = self._call.fullmatch(text.strip())
        if match is None:
            return []
        name, text = match[1], match[2]
        tool = tools.get(name, {})
        names = list(tool.get("required") or tool.get("properties") or ())
        if name not in tools:
            return [Call(name)]
        if len(names) != 1:
            return [make_call(name, text)]
        call = make_call(name, text)
        return [call if names[0] in call.arguments else Call(name, {names[0]: text})]

    def render(self, calls: Sequence[Call]) -> str:
        """Of the first of them: a turn has one."""
        call = calls[0]
        values = list(call.arguments.values())
        only = values[0] if len(values) == 1 and isinstance(values[0], str) else None
        return f"@{call.name} {to_json(dict(call.arguments)) if only is None else only}"
