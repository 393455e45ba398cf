"""Tool calls in Python's notation and Gemma's, with literals instead of JSON as arguments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jrl.tasks.tools.call_format import (
    MarkedFormat,
    ParsedCalls,
    skip_blanks,
    skip_unreadable,
    to_json,
)
from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORDS = {
    **dict.fromkeys(("true", "True"), True),
    **dict.fromkeys(("false", "False"), False),
    **dict.fromkeys(("null", "None"), None),
}
_WORD = re.compile("(?:" + "|".join(_WORDS) + r")(?![\w.])")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PYTHON = re.compile(
    r"'''(?:[^\\]|\\.)*?'''"
    + r'|"""(?:[^\\]|\\.)*?"""'
    + r"|'(?:[^'\\]|\\.)*'|"
    + r'"(?:[^"\\]|\\.)*"',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0"},
    **{"\n": "", "\\": "\\", "'": "'", '"': '"'},
}
MAX_NESTING = 64
MAX_DIGITS = 1000


class Literals:
    """Parser of literals in a text, from `position` on.

    Strings may contain line breaks, as in programs that policies write. They are Python's, or
    enclosed in one of the `quotes`, without escapes.
    """

    def __init__(self, text: str, position: int, quotes: Sequence[str] | None = None):
        self.text, self.position, self._quotes = text, position, quotes
        self._depth = 0

    def next_is(self, mark: str) -> bool:
        """Advances past the mark and returns True if it comes next, after optional blanks."""
        position = skip_blanks(self.text, self.position)
        if not self.text.startswith(mark, position):
            return False
        self.position = position + len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Advances past a mark; raises ValueError if it does not come next."""
        if not self.next_is(mark):
            raise ValueError(f"{mark} is missing at its character {self.position + 1}")

    def name(self) -> str | None:
        """Advances past a name and returns it; None if none comes next."""
        return self._match(_NAME)

    def value(self) -> Any:
        """Parses the next value.

        Raises:
          ValueError: if there is none.
        """
        self._depth += 1
        try:
            if self._depth > MAX_NESTING:
                raise ValueError("its values are nested too deeply")
            return self._value()
        finally:
            self._depth -= 1

    def _value(self) -> Any:
        if self.next_is("["):
            return [self.value() for _ in self.items("]")]
        if self.next_is("{"):
            return self.mapping()
        if (text := self._string()) is not None:
            return text
        if (number := self._match(_NUMBER)) is not None:
            if len(number) > MAX_DIGITS:
                raise ValueError("it has a number of more digits than can be read")
            return int(number) if re.fullmatch(r"[-+]?\d+", number) else float(number)
        if (word := self._match(_WORD)) is not None:
            return _WORDS[word]
        raise ValueError(f"no value can be read at its character {self.position + 1}")

    def mapping(self) -> dict[str, Any]:
        """Parses names and values up to the closing brace."""
        entries: dict[str, Any] = {}
        for _ in self.items("}"):
            key = self._string()
            key = self.name() if key is None else key
            if key is None:
                raise ValueError(f"a name is missing at its character {self.position + 1}")
            self.expect(":")
            entries[key] = self.value()
        return entries

    def items(self, close: str) -> Iterator[None]:
        """Yields before each item of a list, which the caller must parse; advances past commas and
        the closing mark."""
        while not self.next_is(close):
            yield
            if not self.next_is(","):
                self.expect(close)
                break

    def _string(self) -> str | None:
        if self._quotes is None:
            quoted = self._match(_PYTHON)
            if quoted is None:
                return None
            quote = 3 if quoted[:3] in ("'''", '"""') and len(quoted) >= 6 else 1
            return _ESCAPE.sub(_unescape, quoted[quote:-quote])
        for quote in self._quotes:
            if self.next_is(quote):
                end = self.text.find(quote, self.position)
                if end < 0:
                    raise ValueError(f"{quote} is missing behind its last text")
                text, self.position = self.text[self.position : end], end + len(quote)
                return text
        return None

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, skip_blanks(self.text, self.position))
        if match is None:
            return None
        self.position = match.end()
        return match[0]


def _unescape(match: re.Match[str]) -> str:
    mark = match[1]
    if mark[0] in "xuU" and len(mark) > 1:
        code = int(mark[1:], 16)
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else match[0]
    return _ESCAPES.get(mark, match[0])


def read_call(literals: Literals, tools: ToolParameters) -> Call:
    """Parses the next call, ``name(argument=value, ...)``.

    Raises:
      ValueError: if there is none.
    """
    name = literals.name()
    if name is None:
        raise ValueError("it lacks the name of a tool")
    literals.expect("(")
    return Call(name, read_arguments(literals, name, tools))


def read_arguments(literals: Literals, name: str, tools: ToolParameters) -> dict[str, Any]:
    """Parses the arguments of a call up to its closing parenthesis; positional arguments are named
    in the order of the tool's parameters."""
    order = list(tools.get(name, {}).get("properties") or {})
    arguments: dict[str, Any] = {}
    for _ in literals.items(")"):
        position = literals.position
        argument = literals.name()
        if argument is None or not literals.next_is("="):
            literals.position = position
            if len(arguments) >= len(order):
                raise ValueError("an argument lacks its name")
            argument = order[len(arguments)]
        if argument in arguments:
            raise ValueError(f"it gives the argument {argument} twice")
        arguments[argument] = literals.value()
    return arguments


def format_python_call(call: Call) -> str:
    """Writes a call in Python's notation."""
    arguments = (f"{name}={_format_literal(value)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


class Olmo(MarkedFormat):
    """Format of OLMo 3, with one call per line::

    <function_calls>
    add(a=1, b=2)
    </function_calls>
    """

    name = "olmo"
    template_markers = ("<function_calls>",)
    _opening = re.compile(r"<function_calls>")
    _open, _close = "<function_calls>", "</function_calls>"

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        """The calls up to the closing mark, or the end of the turn."""
        literals, calls = Literals(text, opened.end()), list[Call]()
        try:
            while not literals.next_is(self._close):
                if calls and skip_blanks(text, literals.position) == len(text):
                    break
                calls.append(self._read_call(literals, tools))
        except ValueError as error:
            return skip_unreadable(text, opened, self._close, str(error))
        return calls or [unreadable_call("it is empty")], literals.position

    def _read_call(self, literals: Literals, tools: ToolParameters) -> Call:
        return read_call(literals, tools)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join((self._open, *map(format_python_call, calls), self._close))


class ToolCode(Olmo):
    """Format of Gemma 2 and 3, if the prompt requests it; ``print(...)`` around a call is ignored::

    ```tool_code
    add(a=1, b=2)
    ```
    """

    name = "tool-code"
    template_markers = ("tool_code",)
    _opening = re.compile(r"```tool_code\b")
    _open, _close = "```tool_code", "```"

    def _read_call(self, literals: Literals, tools: ToolParameters) -> Call:
        printed = "print" not in tools and literals.next_is("print(")
        literals.next_is("default_api.")
        call = read_call(literals, tools)
        if printed:
            literals.expect(")")
        return call


class PythonList(MarkedFormat):
    """Format of Llama 4 and Gemma 3, if the template requests it: a list of calls that is the whole
    turn, or its end::

    [add(a=1, b=2), add(a=3, b=4)]
    """

    name = "python-list"
    template_markers = ("[func_name1(", "<|python_start|>")
    _opening = re.compile(r"^[ \t]*(?:<\|python_start\|>\s*)?\[(?=\s*[A-Za-z_][\w.]*\s*\()", re.M)
    _end = re.compile(r"\s*(?:<\|python_end\|>\s*)?")

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        literals = Literals(text, opened.end())
        try:
            calls = [read_call(literals, tools) for _ in literals.items("]")]
        except ValueError as error:
            # Other brackets are an answer.
            name = Literals(text, opened.end()).name() or ""
            if name not in tools:
                return [], opened.end()
            return [unreadable_call(str(error), name)], len(text)
        ends = self._end.fullmatch(text, literals.position)
        if not ends or any(call.name not in tools for call in calls):
            return [], literals.position
        return calls, len(text)

    def render(self, calls: Sequence[Call]) -> str:
        return f"[{', '.join(map(format_python_call, calls))}]"


class FunctionGemma(MarkedFormat):
    """Format of FunctionGemma, with marks around texts::

    <start_function_call>call:add{a:1,b:<escape>two<escape>}<end_function_call>
    """

    name = "function-gemma"
    template_markers = ("<start_function_call>",)
    _open, _close, _quote = "<start_function_call>", "<end_function_call>", "<escape>"
    _opening = re.compile(re.escape(_open))

    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        literals = Literals(text, opened.end(), (self._quote,))
        try:
            literals.expect("call:")
            name = literals.name()
            if name is None:
                raise ValueError("it lacks the name of a tool")
            literals.expect("{")
            call = Call(name, literals.mapping())
        except ValueError as error:
            return skip_unreadable(text, opened, self._close, str(error))
        literals.next_is(self._close)
        return [call], literals.position

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
    """Format of Gemma 4::

    <|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>
    """

    name = "gemma-4"
    template_markers = ("<|tool_call>",)
    _open, _close, _quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    _opening = re.compile(re.escape(_open))


def _format_literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{n!r}: {_format_literal(v)}" for n, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_literal, value)) + "]"
    return repr(value)
