"""Calls written as Python's: of OLMo 3, and as a list of calls that is the whole turn."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call
from jrl.tasks.tools.formats.format import (
    ParsedCalls,
    ToolFormat,
    outside_reasoning,
    skip_unreadable,
)
from jrl.tasks.tools.formats.literals import Literals


def read_call(literals: Literals, tools: ToolParameters) -> Call:
    """The call that comes next, ``name(argument=value, ...)``.

    Raises:
      ValueError: where none does.
    """
    name = literals.name()
    if name is None:
        raise ValueError("no name of a tool stands in it")
    literals.expect("(")
    return Call(name, read_arguments(literals, name, tools))


def read_arguments(literals: Literals, name: str, tools: ToolParameters) -> dict[str, Any]:
    """The arguments of a call up to the parenthesis that closes them; those without a name are
    given in the order of the tool's."""
    order = list(tools.get(name, {}).get("properties") or {})
    arguments: dict[str, Any] = {}
    while not literals.next_is(")"):
        position = literals.position
        argument = literals.name()
        if argument is None or not literals.next_is("="):
            literals.position = position
            if len(arguments) >= len(order):
                raise ValueError("an argument stands there without its name")
            argument = order[len(arguments)]
        if argument in arguments:
            raise ValueError(f"it gives the argument {argument} twice")
        arguments[argument] = literals.value()
        if not literals.next_is(","):
            literals.expect(")")
            break
    return arguments


def read_calls_until(
    text: str, opened: re.Match[str], close: str, read: Callable[[Literals], Call]
) -> ParsedCalls:
    """The calls between an opening and what closes it, or the end of the turn.

    Args:
      read: reads the call that comes next.
    """
    literals, calls = Literals(text, opened.end()), list[Call]()
    try:
        while not literals.next_is(close):
            if calls and not text[literals.position :].strip():
                break
            calls.append(read(literals))
    except ValueError as error:
        return skip_unreadable(text, opened, close, str(error))
    return calls or [unreadable_call("nothing stands in it")], literals.position


def format_python_call(call: Call) -> str:
    """A call as Python's."""
    return (
        f"{call.name}({', '.join(f'{n}={_format_literal(v)}' for n, v in call.arguments.items())})"
    )


class Olmo(ToolFormat):
    """Of OLMo 3, a call on each line::

    <function_calls>
    add(a=1, b=2)
    </function_calls>
    """

    name = "olmo"
    template_markers = ("<function_calls>",)
    _opening = re.compile(r"<function_calls>")
    _close = "</function_calls>"

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> ParsedCalls:
            return read_calls_until(
                text, opened, self._close, lambda literals: read_call(literals, tools)
            )

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(("<function_calls>", *map(format_python_call, calls), self._close))


class PythonList(ToolFormat):
    """A list of calls that is the whole turn, or its end, as templates for Llama 4 and Gemma 3 ask
    for it::

    [add(a=1, b=2), add(a=3, b=4)]
    """

    name = "python-list"
    template_markers = ("[func_name1(", "<|python_start|>")
    _opening = re.compile(r"^[ \t]*(?:<\|python_start\|>)?\s*\[(?=\s*[A-Za-z_][\w.]*\s*\()", re.M)
    _end = re.compile(r"\s*(?:<\|python_end\|>)?\s*")

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> ParsedCalls:
            literals, calls = Literals(text, opened.end()), list[Call]()
            try:
                while not literals.next_is("]"):
                    calls.append(read_call(literals, tools))
                    if not literals.next_is(","):
                        literals.expect("]")
                        break
            except ValueError as error:
                # Other brackets are an answer.
                name = Literals(text, opened.end()).name() or ""
                if name not in tools:
                    return [], opened.end()
                return [unreadable_call(str(error), name)], len(text)
            end = self._end.match(text, literals.position)
            if end is None or end.end() < len(text) or any(x.name not in tools for x in calls):
                return [], literals.position
            return calls, len(text)

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        return f"[{', '.join(map(format_python_call, calls))}]"


def _format_literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{n!r}: {_format_literal(v)}" for n, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_literal, value)) + "]"
    return repr(value)
