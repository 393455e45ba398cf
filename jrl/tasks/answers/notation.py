"""Normalisation of the notation of an answer to one spelling, and its tokens."""

import re
from typing import NamedTuple

DASH = "\u2013"
"""Dash between the ends of a range."""
_SIGNS = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # wide letters, digits and marks
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u2012\u2015"), DASH),
    **dict.fromkeys(map(ord, "\u00d7\u00b7\u2219\u22c5\u2217"), " * "),
    **dict.fromkeys(map(ord, "\u00f7\u2044\u2215"), "/"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\ufffd“”"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"), None),
    **dict.fromkeys(map(ord, "\u2018\u2019"), "'"),
    **dict.fromkeys(map(ord, "≈≡"), " = "),
    ord("—"): " ; ",
    ord("°"): " degrees ",
    ord("≤"): " <= ",
    ord("≥"): " >= ",
    ord("≠"): " != ",
    ord("¬"): " not ",
    **dict.fromkeys(map(ord, "❌✗✘"), " wrong "),
}
MONEY = "\uff04"
"""Sign of dollars; "$" also delimits formulas."""
_STRUCK_OUT = re.compile(
    r"~~[^~\n]*~~|<(s|del|strike)>.{0,300}?</\1>|\\(?:[bx]?cancel|sout|st)\s*\{[^{}]*\}", re.DOTALL
)
# A dash that is a sign, at the beginning of a value: "—5", "x = —5".
_LONG_MINUS = re.compile(r"(?:(?<![^(\[{=:$])|(?<=\bis )|(?<=\bare )|(?<=[=:] ))—(?=[\d.\\])")
_BULLET = re.compile(r"(?m)^[ \t]*[-*+][ \t]+(?=\S)")
_FORMULA = re.compile(r"[ \t]*[-+][ \t]+(?:[^\n]*[\\^_=]|[A-Za-z](?![A-Za-z]))")
# "18. She has pens." begins with its answer.
_NUMBERING = re.compile(r"(?m)^[ \t]*\d{1,2}[.)][ \t]+(?=[^\n]*\d)")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_UNSPACED = re.compile(r"(?<=[\u3040-\u9fff])(?=[\d\\$])|(?<=\d)(?=[\u3040-\u9fff])")
_RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_REPLACEMENTS = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\\\$", MONEY),
        (r"(?<![\w$\\}])\$(?=\d[^$\n]*(?:\n|\Z|(?<=[\s(])\$))", MONEY),
        (
            r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|underline"
            r"|bold|emph|ensuremath)\s*\{([^{}]*)\}",
            r" \1 ",
        ),
        (r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", " * "),
        (r"\\div(?![A-Za-z])", "/"),
        (
            r"\\frac\s*\{\s*(km|cm|mm|kg|mg|mi|miles)\s*\}\s*\{\s*(h|hr|s|min|L|l|day)\s*\}",
            r" \1/\2",
        ),
        (r"\\(?:pm|mp)(?![A-Za-z])|∓|\+\s*/\s*-", "±"),
        (r"\{([-+])\}", r"\1"),
        (r"\\(?:leq?|leqslant)(?![A-Za-z])", " <= "),
        (r"\\(?:geq?|geqslant)(?![A-Za-z])", " >= "),
        (r"\\lt(?![A-Za-z])", " < "),
        (r"\\gt(?![A-Za-z])", " > "),
        (r"\\(?:neg|lnot)(?![A-Za-z])", " not "),
        (r"\\(?:neq?(?![A-Za-z])|not(?![A-Za-z])\s*=?)", " != "),
        (r"\\(?:approx|equiv|simeq)(?![A-Za-z])", " = "),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", " degrees "),
        (r"\\pi(?![A-Za-z])", "π"),
        (r"\\triangle(?![A-Za-z])", "△ "),
        (r"\\angle(?![A-Za-z])", "∠ "),
        (r"\\([%{}])", r"\1"),
        (r"\\[()\[\]]", " "),
        # Thin spaces between digits group them, as a blank does.
        (r"\\!", ""),
        (r"\\[,;:> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"(?<=\d)\{,\}(?=\d)", ","),
        (r"\\\\", "\n"),
        (r"(?i)</?(?:b|strong|i|em|p|br|div|span|u|mark|code)\s*/?>", " "),
        (r"(?<=[\d)\]}])\*\*(?=[\d({-])", "^"),
        (r"(?<![A-Za-z\\])sqrt(?=\s*[({\d])", r"\\sqrt"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", "π"),
        (r"\*\*", ""),
        (r"__|[`\"]", ""),
        (r"(?<![\w)\]}*])\*(?![\s*])([^*\n]*?)(?<![\s*])\*(?![\w(*])", r"\1"),  # emphasis
        (r"•", " "),
    )
]


def plain_notation(text: str, *, marked: bool = True) -> str:
    """Removes typesetting from a text: emphasis, delimiters, spaces, wide digits, struck-out text.

    Args:
      marked: whether the text is an answer alone. In running text the marks of a list are removed
        as well: "- 18" and "1. 18" are 18, and "-18" is not.
    """
    if "~~" in text or "<" in text or "\\" in text:
        text = _STRUCK_OUT.sub(" ", text)
    if not marked and ("\n" in text.strip() or not _FORMULA.match(text)):
        text = _BULLET.sub(" ", text)
    if "—" in text:
        text = _LONG_MINUS.sub("-", text)
    text = text.translate(_SIGNS)
    if not text.isascii():
        text = _UNSPACED.sub(" ", text)
        text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    for pattern, instead in _REPLACEMENTS:
        text = pattern.sub(instead, text)
    return text if marked else _NUMBERING.sub(" ", text)


_COMMAS = re.compile(r"(?<![\d,.])\d+(?:,\d+)+(?![\d,])")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+")


def space_lists(text: str) -> str:
    """A text with a blank behind the commas between integers that do not group digits: 1, 2."""

    def spaced(match: re.Match[str]) -> str:
        return match[0] if _GROUPED.fullmatch(match[0]) else match[0].replace(",", ", ")

    return _COMMAS.sub(spaced, text) if "," in text else text


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
    r"|(?P<currency>[$\uff04€£¥₹₽₩¢฿])"
    r"|(?P<other>\S)"
)
_PAIR = re.compile(r"(?!\d{1,3},\d{3}$)\d+,\d+")


class Token(NamedTuple):
    """A token of a text.

    Attributes:
      kind: number, command, word, vulgar, constant, relation, math, comma, stop, currency or other.
      text: as written.
      begin, end: position in the text.
    """

    kind: str
    text: str
    begin: int
    end: int


def tokens_of(text: str) -> list[Token]:
    """All tokens of a text, without blanks. A comma that groups digits is part of its number, and
    any other separates two numbers."""
    tokens: list[Token] = []
    for match in _TOKEN.finditer(text):
        written, kind = match[0], match.lastgroup or "other"
        begin, end = match.span()
        if kind == "number" and _PAIR.fullmatch(written):
            first, _, second = written.partition(",")
            comma = begin + len(first)
            tokens.append(Token("number", first, begin, comma))
            tokens.append(Token("comma", ",", comma, comma + 1))
            tokens.append(Token("number", second, comma + 1, end))
        else:
            tokens.append(Token(kind, written, begin, end))
    return tokens


def canonical_number(written: str) -> str:
    """A number as text: without grouping, leading zeros and zeros at the end of a fraction."""
    mantissa, mark, exponent = written.lower().replace(" ", "").partition("e")
    is_grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", mantissa)
    integer, point, fraction = mantissa.replace(",", "" if is_grouped else ".").partition(".")
    integer, fraction = integer.lstrip("0") or "0", fraction.rstrip("0")
    return integer + (point + fraction if fraction else "") + (mark + exponent if mark else "")
