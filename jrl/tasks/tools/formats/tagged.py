"""Calls between ``<tool_call>`` tags: JSON, GLM's keys and values, Qwen3-Coder's parameters."""

import re
from collections.abc import Sequence
from typing import Any

from jrl.tasks.tools.calls import Call, Known
from jrl.tasks.tools.formats.format import (
    Read,
    ToolFormat,
    not_read,
    outside_reasoning,
    skip_blanks,
)
from jrl.tasks.tools.formats.json_text import call_of, read_value, written
from jrl.tasks.tools.schema import from_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """Of Hermes, Qwen 2.5 and 3, SmolLM3 and many others::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
    """

    name = "hermes"
    marks = (OPEN,)
    _opening = re.compile(re.escape(OPEN))

    def calls(self, text: str, known: Known) -> list[Call]:
        return outside_reasoning(text, self._opening, _json)

    def render(self, calls: Sequence[Call]) -> str:
        bodies = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
        return "\n".join(f"{OPEN}\n{written(body)}\n{CLOSE}" for body in bodies)


def _json(text: str, opened: re.Match[str]) -> Read:
    place = skip_blanks(text, opened.end())
    if not text.startswith("{", place):
        return not_read(text, opened, CLOSE, "it is no JSON object with a name and arguments")
    try:
        found, end = read_value(text, place)
    except ValueError as error:
        return not_read(text, opened, CLOSE, str(error))
    end = skip_blanks(text, end)
    if text.startswith(CLOSE, end):
        return [call_of(found)], end + len(CLOSE)
    if end == len(text) or text.startswith(OPEN, end):
        # The end of the turn closes it as well, and the next call.
        return [call_of(found)], end
    return not_read(text, opened, CLOSE, "something stands behind its JSON object")


class Glm(ToolFormat):
    """Of GLM-4.5 and later ones; a text stands without quotes::

    <tool_call>add
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>
    """

    name = "glm"
    marks = ("<arg_key>",)
    _opening = re.compile(re.escape(OPEN))
    _name = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>|$)")
    _pair = re.compile(
        r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
    )

    def calls(self, text: str, known: Known) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> Read:
            if (name := self._name.match(text, opened.end())) is None:
                return not_read(text, opened, CLOSE, "no name of a tool stands in it")
            given, place = _arguments(self._pair, text, name, known)
            place = skip_blanks(text, place)
            # Of one that is not closed nobody knows whether that is all of it.
            if text.startswith(CLOSE, place):
                return [Call(name[1], given)], place + len(CLOSE)
            return not_read(text, opened, CLOSE, "it is not made of arg_key and arg_value")

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f"{OPEN}{call.name}\n"
            + "".join(
                f"<arg_key>{name}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
                for name, value in call.arguments.items()
            )
            + CLOSE
            for call in calls
        )


class QwenCoder(ToolFormat):
    """Of Qwen3-Coder and Qwen3.5; a text stands without quotes::

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>
    """

    name = "qwen-coder"
    marks = ("<function=",)
    _opening = re.compile(r"(?:<tool_call>\s*)?<function=|<tool_call>")
    _name = re.compile(r"([\w.-]+)>")
    _pair = re.compile(r"\s*<parameter=([^>\n]+)>(?:\r?\n)?(.*?)(?:\r?\n)?</parameter>", re.DOTALL)
    _close = re.compile(r"\s*</function>(?:\s*</tool_call>)?")

    def calls(self, text: str, known: Known) -> list[Call]:
        def read(text: str, opened: re.Match[str]) -> Read:
            name = self._name.match(text, opened.end()) if opened[0] != OPEN else None
            if name is None:
                return not_read(text, opened, CLOSE, "no function=NAME stands in it")
            given, place = _arguments(self._pair, text, name, known)
            if closed := self._close.match(text, place):
                return [Call(name[1], given)], closed.end()
            return not_read(text, opened, CLOSE, "it is not made of parameters")

        return outside_reasoning(text, self._opening, read)

    def render(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f"{OPEN}\n<function={call.name}>\n"
            + "".join(
                f"<parameter={name}>\n{_bare(value)}\n</parameter>\n"
                for name, value in call.arguments.items()
            )
            + f"</function>\n{CLOSE}"
            for call in calls
        )


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else written(value)


def _arguments(
    pair: re.Pattern[str], text: str, name: re.Match[str], known: Known
) -> tuple[dict[str, Any], int]:
    """The arguments that follow the name of a tool, and the place behind them.

    Args:
      pair: an argument's name and its text.
    """
    place, given = name.end(), dict[str, Any]()
    properties = known.get(name[1], {}).get("properties") or {}
    while found := pair.match(text, place):
        given[found[1]] = from_text(found[2], properties.get(found[1]))
        place = found.end()
    return given, place
