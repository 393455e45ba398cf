"""Calls of Kimi-K2 and DeepSeek: a section between special tokens, with one for each call."""

import re
from collections.abc import Sequence

from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call
from jrl.tasks.tools.formats.format import ParsedCalls, ToolFormat, outside_reasoning, skip_blanks
from jrl.tasks.tools.formats.json_text import make_call, read_value, to_json

_BAR, _GAP = "\uff5c", "\u2581"


def _deepseek(*words: str) -> str:
    return f"<{_BAR}{_GAP.join(words)}{_BAR}>"


class Kimi(ToolFormat):
    """Of Kimi-K2::

        <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>
        {"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>

    The number is that of the call in its conversation, and with the name its id.
    """

    name = "kimi"
    template_markers = ("<|tool_calls_section_begin|>", "<|im_system|>tool_declare")
    _opening = re.compile(
        r"<\|tool_call_begin\|>|<\|tool_calls_section_begin\|>(?!\s*<\|tool_call_begin\|>)"
    )
    _head = re.compile(r"\s*((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")
    _close = "<|tool_call_end|>"

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> ParsedCalls:
            head = self._head.match(text, opened.end())
            if head is None:
                return _skip_to_close(
                    text, opened.end(), self._close, "no name of a tool stands in it"
                )
            return _read_json_call(text, head.end(), self._close, head[2], head[1])

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        each = "".join(
            f"<|tool_call_begin|>{call.id or self.call_id(call.name, index)}"
            f"<|tool_call_argument_begin|>{to_json(dict(call.arguments))}{self._close}"
            for index, call in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"

    def call_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def usable_id(self, identity: str) -> bool:
        return re.fullmatch(r"functions\.[\w.-]+:\d+", identity) is not None


class DeepSeek(ToolFormat):
    """Of DeepSeek-V3 and R1: between its special tokens for the begin and the end of a call stand
    ``function``, the separator, the name, and the arguments as a block of JSON."""

    name = "deepseek"
    template_markers = (_deepseek("tool", "calls", "begin"), _deepseek("tool", "call", "begin"))
    _begin, _separator = _deepseek("tool", "call", "begin"), _deepseek("tool", "sep")
    _close = _deepseek("tool", "call", "end")
    _section = template_markers[0], _deepseek("tool", "calls", "end")
    _opening = re.compile(
        f"{re.escape(_begin)}|{re.escape(_section[0])}(?!\\s*{re.escape(_begin)})"
    )
    _head = re.compile(r"\s*([\w.-]+)\s*" + re.escape(_separator))
    _block = re.compile(r"\s*([\w.-]+)\s*```(?:json)?\s*")

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> ParsedCalls:
            head = self._head.match(text, opened.end())
            if head is None:
                return _skip_to_close(
                    text, opened.end(), self._close, "no name of a tool stands in it"
                )
            if block := self._block.match(text, head.end()):
                return _read_json_call(text, block.end(), self._close, block[1])
            return _read_json_call(text, head.end(), self._close, head[1])

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        each = "\n".join(
            f"{self._begin}function{self._separator}{call.name}\n"
            f"```json\n{to_json(dict(call.arguments))}\n```{self._close}"
            for call in calls
        )
        return self._section[0] + each + self._section[1]


class DeepSeekNamed(DeepSeek):
    """Of DeepSeek-V3.1: the name, the separator and the arguments alone."""

    name = "deepseek-v3.1"

    def matches_template(self, template: str) -> bool:
        return super().matches_template(template) and "```json" not in template

    def render(self, calls: Sequence[Call]) -> str:
        each = "".join(
            f"{self._begin}{call.name}{self._separator}{to_json(dict(call.arguments))}{self._close}"
            for call in calls
        )
        return self._section[0] + each + self._section[1]


def _read_json_call(
    text: str, position: int, close: str, name: str, identity: str = ""
) -> ParsedCalls:
    try:
        arguments, end = read_value(text, skip_blanks(text, position))
    except ValueError as error:
        return _skip_to_close(text, position, close, str(error), name)
    behind = re.compile(r"\s*(?:```)?\s*" + re.escape(close)).match(text, end)
    return [make_call(name, arguments, identity)], end if behind is None else behind.end()


def _skip_to_close(
    text: str, position: int, close: str, reason: str, name: str = ""
) -> ParsedCalls:
    end = text.find(close, position)
    return [unreadable_call(reason, name)], len(text) if end < 0 else end + len(close)
