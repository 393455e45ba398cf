"""Calls of a policy without a chat template: ``@name text`` as the whole of its turn."""

import re
from collections.abc import Sequence

from jrl.tasks.tools.calls import Call, Known
from jrl.tasks.tools.formats.format import ToolFormat
from jrl.tasks.tools.formats.json_text import arguments_of, written


class Plain(ToolFormat):
    """The text is the one argument of a tool that needs one, and an object of them in JSON for
    another."""

    name = "plain"
    marks = ()
    _call = re.compile(r"@([A-Za-z_]\w*)[ \t]+(.*)", re.DOTALL)

    def calls(self, text: str, known: Known) -> list[Call]:
        found = self._call.fullmatch(text.strip())
        if found is None:
            return []
        name, text = found[1], found[2]
        tool = known.get(name, {})
        names = list(tool.get("required") or tool.get("properties") or ())
        if name not in known:
            return [Call(name)]
        if len(names) != 1:
            return [arguments_of(name, text)]
        call = arguments_of(name, text)
        return [call if names[0] in call.arguments else Call(name, {names[0]: text})]

    def render(self, calls: Sequence[Call]) -> str:
        """Of the first of them: a turn has one."""
        call = calls[0]
        values = list(call.arguments.values())
        only = values[0] if len(values) == 1 and isinstance(values[0], str) else None
        return f"@{call.name} {written(dict(call.arguments)) if only is None else only}"
