"""Tokens of an answer in plain notation: numbers, signs, words."""

import re
from typing import NamedTuple

from .markup import parse_vulgar_fraction

_NUMBER = (
    r"\d{1,3}(?:,\d{3})+(?!\d|,\d)(?:\.\d+)?"
    r"|\d{1,3}(?: \d{3})+(?!\d| \d)(?:\.\d+)?"
    r"|\d+\.\d+|\d+,\d+(?!\d|,\d)|\d+|\.\d+"
)
_TOKEN = re.compile(
    rf"(?P<number>(?:{_NUMBER})(?:[eE][+-]?\d{{1,6}}(?![\w.]))?)"
    r"|(?P<command>\\[A-Za-z]+)"
    r"|(?P<vulgar>[¼-¾⅐-⅞↉])"
    r"|(?P<constant>π)"
    r"|(?P<word>[^\W\d_][\w']*(?:-[^\W\d_][\w']*)*)"
    r"|(?P<relation><=|>=|!=|<|>)"
    r"|(?P<math>\*\*|[-+*/^_=√%!(){}\[\]±\u2013:])"
    r"|(?P<comma>[,;|])"
    r"|(?P<stop>[.?]+(?=\s|$)|\n+)"
    r"|(?P<currency>[$€£¥₹₽₩¢฿])"
    r"|(?P<other>\S)"
)
_PAIR = re.compile(r"(?!\d{1,3},\d{3}$)\d+,\d+")


class Token(NamedTuple):
    """A piece of a text.

    Attributes:
      kind: number, command, word, vulgar, constant, relation, math, comma, stop, currency or other.
      text: as written.
      begin, end: where it is in the text.
    """

    kind: str
    text: str
    begin: int
    end: int


def tokens_of(text: str) -> list[Token]:
    """All tokens of a text, blanks left out. A comma in a number is that of a decimal, but for
    brackets, in which it parts two."""
    tokens: list[Token] = []
    depth = 0
    for match in _TOKEN.finditer(text):
        kind, written, begin = match.lastgroup or "other", match[0], match.start()
        if kind == "vulgar" and parse_vulgar_fraction(written) is None:
            kind = "other"
        depth += (written in "([{") - (written in ")]}")
        if depth > 0 and _PAIR.fullmatch(written):
            first, _, second = written.partition(",")
            comma = begin + len(first)
            tokens.append(Token("number", first, begin, comma))
            tokens.append(Token("comma", ",", comma, comma + 1))
            tokens.append(Token("number", second, comma + 1, match.end()))
        else:
            tokens.append(Token(kind, written, begin, match.end()))
    return tokens


def canonical_number(written: str) -> str:
    """A number as text: without grouping, leading zeros and zeros at the end of a fraction."""
    mantissa, mark, exponent = written.lower().replace(" ", "").partition("e")
    integer, point, fraction = _decimal(mantissa).partition(".")
    integer, fraction = integer.lstrip("0") or "0", fraction.rstrip("0")
    return integer + (point + fraction if fraction else "") + (mark + exponent if mark else "")


def _decimal(mantissa: str) -> str:
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", mantissa):
        return mantissa.replace(",", "")
    return mantissa.replace(",", ".")
