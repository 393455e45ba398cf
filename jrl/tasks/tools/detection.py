"""Supported tool-call formats, and detection of the format of a text or a chat template."""

import re
from collections.abc import Sequence

from jrl.tasks.answers.reasoning import MESSAGE
from jrl.tasks.tools.call_format import FoundCalls, ToolFormat, make_call, to_json
from jrl.tasks.tools.calls import Call, ToolParameters
from jrl.tasks.tools.json_calls import (
    DeepSeek,
    DeepSeekNamed,
    Glm,
    Harmony,
    Hermes,
    Kimi,
    Llama,
    Mistral,
    MistralNamed,
    QwenCoder,
)
from jrl.tasks.tools.python_calls import FunctionGemma, Gemma4, Olmo, PythonList, ToolCode


class Plain(ToolFormat):
    """Plain format ``@name text``: the text is the only argument of a tool that needs one, or a
    JSON object of all arguments."""

    name = "plain"
    template_markers = ()
    _call = re.compile(r"@([A-Za-z_]\w*)[ \t]+(.*)", re.DOTALL)

    def find(self, text: str, tools: ToolParameters) -> FoundCalls:
        match = self._call.fullmatch(text.strip())
        if match is None:
            return FoundCalls([], text)
        name, text = match[1], match[2]
        if name not in tools:
            return FoundCalls([Call(name)], "")
        call = make_call(name, text)
        names = list(tools[name].get("required") or tools[name].get("properties") or ())
        if len(names) == 1 and names[0] not in call.arguments:
            call = Call(name, {names[0]: text})
        return FoundCalls([call], "")

    def render(self, calls: Sequence[Call]) -> str:
        """Renders the first call only: a turn has one."""
        call = calls[0]
        values = list(call.arguments.values())
        only = values[0] if len(values) == 1 and isinstance(values[0], str) else None
        return f"@{call.name} {to_json(dict(call.arguments)) if only is None else only}"


PLAIN, HARMONY, HERMES = Plain(), Harmony(), Hermes()
FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    *(Kimi(), DeepSeekNamed(), DeepSeek(), Glm(), QwenCoder(), MistralNamed(), Mistral()),
    *(Olmo(), FunctionGemma(), Gemma4(), HERMES, Llama(), PythonList(), ToolCode()),
)
"""Formats of checkpoints, those with more specific marks first."""


def detect_formats(template: str) -> list[ToolFormat]:
    """The formats with marks in the source of a chat template, the most likely first."""
    return [each for each in FORMATS if each.matches_template(template)]


def detect_calls(text: str, tools: ToolParameters) -> list[Call]:
    """The calls in a turn of unknown format: the calls of the first format that can parse all calls
    that it finds, else of the one that parses the most; Hermes is tried first."""
    if MESSAGE in text:
        return HARMONY.calls(text, tools)
    formats = (HERMES, *(each for each in FORMATS if each is not HERMES), PLAIN)
    attempts = [calls for each in formats if (calls := each.calls(text, tools))]
    return max(attempts, key=_readability, default=[])


def _readability(calls: list[Call]) -> tuple[bool, int]:
    """True if all calls can be read, and the number of those that can."""
    num_readable = sum(not call.error for call in calls)
    return num_readable == len(calls), num_readable
