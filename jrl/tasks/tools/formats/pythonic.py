"""Calls written as Python's: of OLMo 3, and as a list of calls that is the whole turn."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jrl.tasks.tools.calls import Call, Known, unreadable
from jrl.tasks.tools.formats.format import Read, ToolFormat, not_read, outside_reasoning
from jrl.tasks.tools.formats.literals import Literals


def call_in(literals: Literals, known: Known) -> Call:
    """The call that comes next, ``name(argument=value, ...)``.

    Raises:
      ValueError: where none does.
    """
    name = literals.name()
    if name is None:
        raise ValueError("no name of a tool stands in it")
    literals.needed("(")
    return Call(name, arguments_in(literals, name, known))


def arguments_in(literals: Literals, name: str, known: Known) -> dict[str, Any]:
    """The arguments of a call up to the parenthesis that closes them; those without a name are
    given in the order of the tool's."""
    order = list(known.get(name, {}).get("properties") or {})
    given: dict[str, Any] = {}
    while not literals.next_is(")"):
        place = literals.place
        argument = literals.name()
        if argument is None or not literals.next_is("="):
            literals.place = place
            if len(given) >= len(order):
                raise ValueError("an argument stands there without its name")
            argument = order[len(given)]
        if argument in given:
            raise ValueError(f"it gives the argument {argument} twice")
        given[argument] = literals.value()
        if not literals.next_is(","):
            literals.needed(")")
            break
    return given


def calls_up_to(
    text: str, opened: re.Match[str], close: str, read: Callable[[Literals], Call]
) -> Read:
    """The calls between an opening and what closes it, or the end of the turn.

    Args:
      read: reads the call that comes next.
    """
    literals, found = Literals(text, opened.end()), list[Call]()
    try:
        while not literals.next_is(close):
            if found and not text[literals.place :].strip():
                break
            found.append(read(literals))
    except ValueError as error:
        return not_read(text, opened, close, str(error))
    return found or [unreadable("nothing stands in it")], literals.place


def python_call(call: Call) -> str:
    """A call as Python's."""
    return f"{call.name}({', '.join(f'{n}={_literal(v)}' for n, v in call.arguments.items())})"


class Olmo(ToolFormat):
    """Of OLMo 3, a call on each line::

    <function_calls>
    add(a=1, b=2)
    </function_calls>
    """

    name = "olmo"
    marks = ("<function_calls>",)
    _opening = re.compile(r"<function_calls>")
    _close = "</function_calls>"

    def calls(self, text: str, known: Known) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> Read:
            return calls_up_to(text, opened, self._close, lambda literals: call_in(literals, known))

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(("<function_calls>", *map(python_call, calls), self._close))


class PythonList(ToolFormat):
    """A list of calls that is the whole turn, or its end, as templates for Llama 4 and Gemma 3 ask
    for it::

    [add(a=1, b=2), add(a=3, b=4)]
    """

    name = "python-list"
    marks = ("[func_name1(", "<|python_start|>")
    _opening = re.compile(r"^[ \t]*(?:<\|python_start\|>)?\s*\[(?=\s*[A-Za-z_][\w.]*\s*\()", re.M)
    _end = re.compile(r"\s*(?:<\|python_end\|>)?\s*")

    def calls(self, text: str, known: Known) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> Read:
            literals, found = Literals(text, opened.end()), list[Call]()
            try:
                while not literals.next_is("]"):
                    found.append(call_in(literals, known))
                    if not literals.next_is(","):
                        literals.needed("]")
                        break
            except ValueError as error:
                # Other brackets are an answer.
                name = Literals(text, opened.end()).name() or ""
                if name not in known:
                    return [], opened.end()
                return [unreadable(str(error), name)], len(text)
            end = self._end.match(text, literals.place)
            if end is None or end.end() < len(text) or any(x.name not in known for x in found):
                return [], literals.place
            return found, len(text)

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        return f"[{', '.join(map(python_call, calls))}]"


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{n!r}: {_literal(v)}" for n, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)
