"""Argument values that are not JSON: Python's literals, and strings in other quotes."""

import re
from collections.abc import Sequence
from typing import Any

from jrl.tasks.tools.formats.format import skip_blanks

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
    """Reads literals from a text; `position` is where it has come to.

    Strings may have line ends in them, as policies write programs.

    Args:
      text: to read.
      position: to begin at.
      quotes: what a string stands between, without escapes; None is Python's strings.
    """

    def __init__(self, text: str, position: int, quotes: Sequence[str] | None = None):
        self.text, self.position, self._quotes = text, position, quotes
        self._depth = 0

    def next_is(self, mark: str) -> bool:
        """True if the mark comes next, apart from blanks; advances past it then."""
        position = skip_blanks(self.text, self.position)
        if not self.text.startswith(mark, position):
            return False
        self.position = position + len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Passes over a mark that has to come next."""
        if not self.next_is(mark):
            raise ValueError(f"{mark} is missing at its character {self.position + 1}")

    def name(self) -> str | None:
        """A name, passed over; None where none comes next."""
        return self._match(_NAME)

    def value(self) -> Any:
        """The value that comes next.

        Raises:
          ValueError: where there is none.
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
            return self._list()
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
        """Names and values up to the brace that closes them."""
        entries: dict[str, Any] = {}
        while not self.next_is("}"):
            key = self._string()
            key = self.name() if key is None else key
            if key is None:
                raise ValueError(f"a name is missing at its character {self.position + 1}")
            self.expect(":")
            entries[key] = self.value()
            if not self.next_is(","):
                self.expect("}")
                break
        return entries

    def _list(self) -> list[Any]:
        items: list[Any] = []
        while not self.next_is("]"):
            items.append(self.value())
            if not self.next_is(","):
                self.expect("]")
                break
        return items

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
