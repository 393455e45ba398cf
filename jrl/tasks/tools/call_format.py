"""Base classes of tool-call formats, and the JSON in the text of a call."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from jrl.tasks.answers.reasoning import PAIRS, mark_pattern
from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call

ParsedCalls = tuple[list[Call], int]
"""Calls, and the position after them."""

_REASONING_TAGS = mark_pattern([*PAIRS, *PAIRS.values()])
_OPENING = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|```\w*|.", re.DOTALL)
"""The mark with which calls begin: a tag, or a bracket of JSON or Python."""


class FoundCalls(NamedTuple):
    """Calls in a text, and the text outside of them without their wrapping."""

    calls: list[Call]
    outside: str


class ToolFormat(ABC):
    """Format in which a kind of checkpoint writes tool calls.

    Attributes:
      name: readable name.
      template_markers: texts, one of which occurs in the chat template of such a checkpoint.
    """

    name: str
    template_markers: tuple[str, ...]

    def matches_template(self, template: str) -> bool:
        """True if the source of a chat template may be of this format."""
        return any(mark in template for mark in self.template_markers)

    @abstractmethod
    def find(self, text: str, tools: ToolParameters) -> FoundCalls:
        """The calls in a text of the policy, with special tokens written out, in order; empty if
        there are none.

        A call that is started and cannot be parsed has an error. Text within reasoning is not a
        call, and neither is a mention of the notation of calls.
        """

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        """The calls that `find` finds."""
        return self.find(text, tools).calls

    @abstractmethod
    def render(self, calls: Sequence[Call]) -> str:
        """The text that a policy writes to make these calls."""

    @cached_property
    def opening_markers(self) -> tuple[str, ...]:
        """Marks with which calls begin; none if the header of a message shows them, or if a call is
        a whole turn."""
        return ()

    def call_id(self, name: str, index: int) -> str:
        """Id of a call in a chat template by its index in the conversation, if the policy wrote no
        usable one."""
        # Nine letters and digits, as some templates require.
        return f"call{index:05d}"

    def usable_id(self, identity: str) -> bool:
        """True if a chat template accepts an id that a policy wrote."""
        return re.fullmatch(r"[A-Za-z0-9]{9}", identity) is not None


class MarkedFormat(ToolFormat):
    """Format whose calls begin with a mark.

    Reasoning tags inside a call, for instance in a text that it passes, are part of the call. An
    end of reasoning that has no start closes reasoning that the prompt opened: calls before it are
    ignored.
    """

    _opening: re.Pattern[str]

    @abstractmethod
    def _read(self, text: str, opened: re.Match[str], tools: ToolParameters) -> ParsedCalls:
        """The calls that begin at a match of `_opening`."""

    @cached_property
    def opening_markers(self) -> tuple[str, ...]:
        rendered = self.render([Call("a")])
        opened = _OPENING.match(rendered)
        assert opened is not None, self.name
        others = [each for each in self.template_markers if self._opening.match(each + rendered)]
        return tuple(dict.fromkeys((opened[0], *others)))

    def find(self, text: str, tools: ToolParameters) -> FoundCalls:
        calls, outside = self._split(text, tools)
        if calls:
            opening, closing = self._wrapping
            outside[1:] = [each.lstrip().removeprefix(closing) for each in outside[1:]]
            outside[:-1] = [each.rstrip().removesuffix(opening) for each in outside[:-1]]
        return FoundCalls(calls, "\n".join(each.strip() for each in outside if each.strip()))

    def _split(self, text: str, tools: ToolParameters) -> tuple[list[Call], list[str]]:
        """The calls, and the texts before, between and behind them."""
        collected, outside, begin = list[Call](), list[str](), 0
        position, pattern = 0, _tag_or_opening(self._opening)
        while match := pattern.search(text, position):
            if match["tag"] is None:
                calls, position = self._read(text, match, tools)
                if calls:
                    outside.append(text[begin : match.start()])
                    collected += calls
                    begin = position
            elif (closed := PAIRS.get(match["tag"].lower())) is None:
                collected, outside, begin, position = [], [], 0, match.end()
            else:
                end = re.compile(re.escape(closed), re.IGNORECASE).search(text, match.end())
                if end is None:
                    break
                position = end.end()
        return collected, [*outside, text[begin:]]

    @cached_property
    def _wrapping(self) -> tuple[str, str]:
        """Text that the format writes before and behind the calls of a turn."""
        _, (opening, closing) = self._split(self.render([Call("a")]), {"a": {}})
        return opening.strip(), closing.strip()


@cache
def _tag_or_opening(opening: re.Pattern[str]) -> re.Pattern[str]:
    """A pattern for the opening of a call, and in its group "tag" for reasoning tags."""
    return re.compile(f"(?P<tag>(?i:{_REASONING_TAGS}))|{opening.pattern}", opening.flags)


def skip_unreadable(
    text: str, opened: re.Match[str], close: str, reason: str, read: int = 0
) -> ParsedCalls:
    """Result for an opening that no parsable call follows: a call with an error that extends to the
    closing mark, or no call if the opening is only mentioned; `read` is the position up to which
    the text was parsed."""
    begin, behind = opened.span()
    if text.startswith("`", behind) and begin and text[begin - 1] == "`":
        return [], behind
    end = find_mark(text, close, behind)
    if end >= 0:
        return [unreadable_call(reason)], end + len(close)
    if not _begins_line(text, begin) and not text.startswith(("{", "["), skip_blanks(text, behind)):
        return [], max(read, behind)
    return [unreadable_call(reason)], len(text)


def _begins_line(text: str, position: int) -> bool:
    """True if only blanks precede this position in its line."""
    while position and text[position - 1] != "\n" and text[position - 1].isspace():
        position -= 1
    return not position or text[position - 1] == "\n"


def find_mark(text: str, mark: str, position: int) -> int:
    """`text.find`, in constant time behind the last mark of a text, so that a reader that looks for
    it at each opening takes linear time."""
    return -1 if position > _last_mark(text, mark) else text.find(mark, position)


@lru_cache(maxsize=16)
def _last_mark(text: str, mark: str) -> int:
    return text.rfind(mark)


def skip_blanks(text: str, position: int) -> int:
    """The position of the first non-blank character from here on."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


_DECODER = json.JSONDecoder()
WINDOW, MARGIN = 4096, 32
"""Characters that are parsed at first, and those at their end in which an error may be due to the
cut: a number, a word or an escape is shorter."""


class NestedTooDeeply(ValueError):
    """Raised for JSON with more levels than the decoder reads."""


def read_value(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at this position, and the position after it.

    It is read from a window that is doubled until the value is whole: an error of the decoder takes
    time in proportion to all the text before it.

    Raises:
      ValueError: if there is none, in one line.
    """
    size = WINDOW
    while True:
        window, is_cut = text[position : position + size], position + size < len(text)
        size *= 2
        try:
            value, end = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            is_string = error.msg.startswith("Unterminated")
            if is_cut and (is_string or error.pos > len(window) - MARGIN):
                continue
            raise ValueError(f"it is no JSON ({error.msg}, character {error.pos + 1})") from None
        except RecursionError:
            raise NestedTooDeeply("its JSON is nested too deeply") from None
        except ValueError:  # of a number with thousands of digits
            raise ValueError("it is no JSON that can be read") from None
        if not is_cut or end <= len(window) - MARGIN:
            return value, position + end


def parse_call(value: Any) -> Call:
    """The call in a JSON value: an object with a name, and arguments as an object or as the JSON
    text of one."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return unreadable_call("it is no JSON object with a name and arguments")
    name, identity = value["name"], value.get("id")
    arguments = value.get("arguments", value.get("parameters", {}))
    return make_call(name, arguments, identity if isinstance(identity, str) else "")


def make_call(name: str, arguments: Any, identity: str = "") -> Call:
    """The call with these arguments, an object or the JSON text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return unreadable_call("its arguments are no JSON object", name)
    if not isinstance(arguments, Mapping):
        return unreadable_call("its arguments are no JSON object", name)
    return Call(name, dict(arguments), identity)


def to_json(value: Any) -> str:
    """The JSON text of a value, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)
