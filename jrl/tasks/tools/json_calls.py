"""Formats of calls whose arguments are a JSON object (Hermes, Llama 3, Mistral, gpt-oss, Kimi-K2,
DeepSeek) or a text each (GLM, Qwen3-Coder)."""

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
    find_mark,
    make_call,
    parse_call,
    read_value,
    skip_blanks,
    skip_unreadable,
    to_json,
)
from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call
from jrl.tasks.tools.python_calls import Literals, read_arguments
from jrl.tasks.tools.schema import parse_argument

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
            return _skip_to_close(text, opened.end(), self._close, "it lacks the name of a tool")
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
            return _skip_to_close(text, opened.end(), self._close, "it lacks the name of a tool")
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
            return skip_unreadable(text, opened, CLOSE, "it lacks the name of a tool")
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
            return skip_unreadable(text, opened, CLOSE, "it lacks function=NAME")
        pairs, position = _read_pairs(self._pair_head, self._pair_end, text, name.end())
        pairs = [(key, re.sub(r"\r?\n\Z", "", value)) for key, value in pairs]
        arguments = _parse_arguments(pairs, name[1], tools)
        if closed := self._close.match(text, position):
            return [Call(name[1], arguments)], closed.end()
        return skip_unreadable(text, opened, CLOSE, "it has more than parameters", position)

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
