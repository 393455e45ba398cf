"""Calls of Gemma: a block of ``tool_code``, and the function calls of FunctionGemma and Gemma 4."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.tools.calls import Call, ToolParameters
from jrl.tasks.tools.formats.format import (
    ParsedCalls,
    ToolFormat,
    outside_reasoning,
    skip_unreadable,
)
from jrl.tasks.tools.formats.json_text import to_json
from jrl.tasks.tools.formats.literals import Literals
from jrl.tasks.tools.formats.pythonic import format_python_call, read_call, read_calls_until


class ToolCode(ToolFormat):
    """Of Gemma 2 and 3, whose prompts ask for it; ``print(...)`` around a call is none of it::

    ```tool_code
    add(a=1, b=2)
    ```
    """

    name = "tool-code"
    template_markers = ("tool_code",)
    _opening = re.compile(r"```tool_code\b")
    _close = "```"

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        def read(literals: Literals) -> Call:
            printed = "print" not in tools and literals.next_is("print(")
            literals.next_is("default_api.")
            call = read_call(literals, tools)
            if printed:
                literals.expect(")")
            return call

        def block(text: str, opened: re.Match[str]) -> ParsedCalls:
            return read_calls_until(text, opened, self._close, read)

        return outside_reasoning(text, self._opening, block)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(("```tool_code", *map(format_python_call, calls), self._close))


class FunctionGemma(ToolFormat):
    """Of FunctionGemma, with a mark around texts::

    <start_function_call>call:add{a:1,b:<escape>two<escape>}<end_function_call>
    """

    name = "function-gemma"
    template_markers = ("<start_function_call>",)
    _open, _close, _quote = "<start_function_call>", "<end_function_call>", "<escape>"

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> ParsedCalls:
            literals = Literals(text, opened.end(), (self._quote,))
            try:
                literals.expect("call:")
                name = literals.name()
                if name is None:
                    raise ValueError("no name of a tool stands in it")
                literals.expect("{")
                call = Call(name, literals.mapping())
            except ValueError as error:
                return skip_unreadable(text, opened, self._close, str(error))
            literals.next_is(self._close)
            return [call], literals.position

        return outside_reasoning(text, re.compile(re.escape(self._open)), read)

    def render(self, calls: Sequence[Call]) -> str:
        return "".join(
            f"{self._open}call:{call.name}{self._format_value(call.arguments)}{self._close}"
            for call in calls
        )

    def _format_value(self, value: Any) -> str:
        if isinstance(value, str):
            return self._quote + value + self._quote
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{n}:{self._format_value(v)}" for n, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._format_value, value)) + "]"
        return to_json(value)


class Gemma4(FunctionGemma):
    """Of Gemma 4::

    <|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>
    """

    name = "gemma-4"
    template_markers = ("<|tool_call>",)
    _open, _close, _quote = "<|tool_call>", "<tool_call|>", '<|"|>'
