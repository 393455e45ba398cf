"""Calls whose arguments are a JSON object: of Llama 3, Mistral, gpt-oss, Kimi-K2 and DeepSeek."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.answers.reasoning import MESSAGE, MESSAGE_ENDS, START, recipient_of
from jrl.tasks.tools.call_format import (
    FoundCalls,
    MarkedFormat,
    NestedTooDeeply,
    ParsedCalls,
    ToolFormat,
    make_call,
    parse_call,
    read_value,
    skip_blanks,
    to_json,
)
from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call
from jrl.tasks.tools.python_calls import Literals, read_arguments

PYTHON_TAG = "<|python_tag|>"


class Llama(MarkedFormat):
    """Format of Llama 3.1 to 3.3::

        {"name": "add", "parameters": {"a": 1, "b": 2}}
        <|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}
        <|python_tag|>add.call(a=1, b=2)

    Without the tag, an object is a call if it names a tool, its parameters are an object, and only
    calls follow: other JSON is an answer.
    """

    name = "llama"
    template_markers = ('function name, "parameters"', r"function name, \"parameters\"", PYTHON_TAG)
    _opening = re.compile(re.escape(PYTHON_TAG) + r"|^[ \t]*(?=\{)", re.MULTILINE)
    _call_start = re.compile(r'\{\s*"name"\s*:\s*"([^"\n]*)"\s*,\s*"(?:parameters|arguments)"\s*:')
    _builtin = re.compile(r"\s*([A-Za-z_]\w*)\.call\s*\(")
    _joint = re.compile(r"\s*;?\s*")
    _end = re.compile(r"\s*(?:<\|eo[mt]_id\|>\s*)*")

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        if opened[0] == PYTHON_TAG:
            return self._read_tagged(text, opened.end(), tools)
        return self._read_bare(text, opened.end(), tools)

    def render(self, calls: Sequence[Call]) -> str:
        bodies = ({"name": call.name, "parameters": dict(call.arguments)} for call in calls)
        return "; ".join(map(to_json, bodies))

    def _read_tagged(self, text: str, position: int, tools: ToolParameters) -> ParsedCalls:
        if builtin := self._builtin.match(text, position):
            literals = Literals(text, builtin.end())
            try:
                arguments = read_arguments(literals, builtin[1], tools)
            except ValueError as error:
                return [unreadable_call(str(error), builtin[1])], len(text)
            return [Call(builtin[1], arguments)], literals.position
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
                # Each of the levels would be read again from its own line.
                too_deep = isinstance(error, NestedTooDeeply)
                return [], len(text) if too_deep else position + 1
            return [unreadable_call(str(error), start[1])], len(text)
        if not self._end.fullmatch(text, end) or not all(_is_call(x, tools) for x in values):
            return [], end
        return [parse_call(each) for each in values], len(text)

    def _read_objects(self, text: str, position: int) -> tuple[list[Any], int]:
        """Consecutive JSON values, optionally separated by semicolons."""
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


MISTRAL_TAG = "[TOOL_CALLS]"


class Mistral(MarkedFormat):
    """Format of Mistral's tokenizers up to version 7, and of later ones that keep it::

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "a1b2c3d4e"}]
    """

    name = "mistral"
    template_markers = (MISTRAL_TAG,)
    _opening = re.compile(re.escape(MISTRAL_TAG))
    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")

    def render(self, calls: Sequence[Call]) -> str:
        bodies = [
            {"name": call.name, "arguments": dict(call.arguments)}
            | ({"id": call.id} if call.id else {})
            for call in calls
        ]
        return MISTRAL_TAG + to_json(bodies)

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        position = opened.end()
        try:
            if named := self._named.match(text, position):
                arguments, end = read_value(text, named.end())
                return [make_call(named[1], arguments, named[2] or "")], end
            value, end = read_value(text, skip_blanks(text, position))
        except ValueError as error:
            behind = text.find(MISTRAL_TAG, position)
            return [unreadable_call(str(error))], len(text) if behind < 0 else behind
        calls = value if isinstance(value, list) else [value]
        return [parse_call(each) for each in calls] or [unreadable_call("its list is empty")], end


class MistralNamed(Mistral):
    """Format of Mistral's tokenizers from version 11 on, the first of them with an id::

    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}
    [TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1, "b": 2}
    """

    name = "mistral-v11"
    template_markers = ("[ARGS]",)

    def render(self, calls: Sequence[Call]) -> str:
        return "".join(
            f"{MISTRAL_TAG}{call.name}[ARGS]{to_json(dict(call.arguments))}" for call in calls
        )


class Harmony(ToolFormat):
    """Format of gpt-oss (Harmony), whose reasoning channel, "analysis", contains no calls::

    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>
    """

    name = "harmony"
    template_markers = ("<|channel|>",)
    _bounds = re.compile("|".join(map(re.escape, (START, *MESSAGE_ENDS))) + "|$")

    def find(self, text: str, tools: ToolParameters) -> FoundCalls:
        calls, outside, begin, last = list[Call](), list[str](), 0, 0
        for bound in self._bounds.finditer(text):
            head, opened, body = text[begin : bound.start()].partition(MESSAGE)
            recipient = recipient_of(head) if opened else None
            if recipient is not None:
                outside.append(text[last:begin].removesuffix(START))
                calls.append(make_call(recipient.removeprefix("functions."), body.strip()))
                last = bound.start() if bound[0] == START else bound.end()
            begin = bound.end()
        return FoundCalls(calls, "".join([*outside, text[last:]]).strip())

    def render(self, calls: Sequence[Call]) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
            f"{MESSAGE}{to_json(dict(call.arguments))}<|call|>"
            for call in calls
        )


_BAR, _GAP = "\uff5c", "\u2581"


def _deepseek(*words: str) -> str:
    return f"<{_BAR}{_GAP.join(words)}{_BAR}>"


class Kimi(MarkedFormat):
    """Format of Kimi-K2::

        <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>
        {"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>

    The number is the index of the call in its conversation, and with the name it is its id.
    """

    name = "kimi"
    template_markers = ("<|tool_calls_section_begin|>", "<|im_system|>tool_declare")
    _opening = re.compile(
        r"<\|tool_call_begin\|>|<\|tool_calls_section_begin\|>(?!\s*<\|tool_call_begin\|>)"
    )
    _head = re.compile(r"\s*((?:functions\.)?([\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")
    _close = "<|tool_call_end|>"

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        head = self._head.match(text, opened.end())
        if head is None:
            return _skip_to_close(text, opened.end(), self._close, "no name of a tool stands in it")
        return _read_json_call(text, head.end(), self._close, head[2], head[1])

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


class DeepSeek(MarkedFormat):
    """Format of DeepSeek-V3 and R1: the special tokens for the begin and the end of a call enclose
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
    _joint = "\n"

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        head = self._head.match(text, opened.end())
        if head is None:
            return _skip_to_close(text, opened.end(), self._close, "no name of a tool stands in it")
        if block := self._block.match(text, head.end()):
            return _read_json_call(text, block.end(), self._close, block[1])
        return _read_json_call(text, head.end(), self._close, head[1])

    def render(self, calls: Sequence[Call]) -> str:
        each = self._joint.join(map(self._format_call, calls))
        return self._section[0] + each + self._section[1]

    def _format_call(self, call: Call) -> str:
        arguments = f"```json\n{to_json(dict(call.arguments))}\n```"
        return f"{self._begin}function{self._separator}{call.name}\n{arguments}{self._close}"


class DeepSeekNamed(DeepSeek):
    """Format of DeepSeek-V3.1: the name, the separator and the arguments only."""

    name = "deepseek-v3.1"
    _joint = ""

    def matches_template(self, template: str) -> bool:
        return super().matches_template(template) and "```json" not in template

    def _format_call(self, call: Call) -> str:
        arguments = to_json(dict(call.arguments))
        return f"{self._begin}{call.name}{self._separator}{arguments}{self._close}"


def _read_json_call(
    text: str, position: int, close: str, name: str, identity: str = ""
) -> ParsedCalls:
    try:
        arguments, end = read_value(text, skip_blanks(text, position))
    except ValueError as error:
        return _skip_to_close(text, position, close, str(error), name)
    behind = re.compile(r"\s*(?:```\s*)?" + re.escape(close)).match(text, end)
    return [make_call(name, arguments, identity)], end if behind is None else behind.end()


def _skip_to_close(
    text: str, position: int, close: str, reason: str, name: str = ""
) -> ParsedCalls:
    end = text.find(close, position)
    return [unreadable_call(reason, name)], len(text) if end < 0 else end + len(close)
