"""Plain notation of an answer, one spelling for what is written in many ways, and its tokens."""

import re
import unicodedata
from typing import NamedTuple

DASH = "\u2013"
"""Between the ends of a range."""
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True))
_SUPERSCRIPT = re.compile(f"[{''.join(SUPERSCRIPTS)}]+")
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_SIGNS = {
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00d7\u00b7\u2219\u22c5\u2217"), " * "),
    **dict.fromkeys(map(ord, "\u00f7\u2044\u2215"), "/"),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\ufffd"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"), None),
    ord(DASH): DASH,
    ord("—"): " ; ",
    ord("°"): " degrees ",
    ord("≤"): " <= ",
    ord("≥"): " >= ",
    ord("≠"): " != ",
    ord("≈"): " = ",
    ord("≡"): " = ",
    0x2018: "'",
    0x2019: "'",
    ord("“"): " ",
    ord("”"): " ",
}
_COMMANDS = (
    (re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|underline"
                r"|bold|emph|ensuremath)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits)(?![A-Za-z])"),
     ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])"), " * "),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    (re.compile(r"\\(?:leq?|leqslant)(?![A-Za-z])"), " <= "),
    (re.compile(r"\\(?:geq?|geqslant)(?![A-Za-z])"), " >= "),
    (re.compile(r"\\lt(?![A-Za-z])"), " < "),
    (re.compile(r"\\gt(?![A-Za-z])"), " > "),
    (re.compile(r"\\(?:ne|neq)(?![A-Za-z])"), " != "),
    (re.compile(r"\\(?:approx|equiv|simeq)(?![A-Za-z])"), " = "),
    (re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])"),
     " degrees "),
    (re.compile(r"\\pi(?![A-Za-z])"), "π"),
    (re.compile(r"\\\$"), " $ "),
    (re.compile(r"\\([%{}])"), r"\1"),
    (re.compile(r"\\[()\[\]]"), " "),
    # Thin spaces between digits group them, as a blank does.
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;:> ]|\\q?quad(?![A-Za-z])|~"), " "),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), ","),
    (re.compile(r"\\\\"), "\n"),
)  # fmt: skip
_POWER = re.compile(r"(?<=[\d)\]}])\*\*(?=[\d({-])")
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt(?=\s*[({\d])")
_EMPHASIS = re.compile(r"(?<![\w)\]}*])\*(?![\s*])([^*\n]*?)(?<![\s*])\*(?![\w(*])")
# Of a line that says another number: "18. She has pens." begins with its answer.
_ENUMERATOR = re.compile(r"(?m)^[ \t]*(?:\d{1,2}[.)][ \t]+(?=[^\n]*\d)|[-*•+][ \t]+(?=\S))")
_HTML = re.compile(r"</?(?:b|strong|i|em|p|br|div|span|u|mark|code)\s*/?>", re.IGNORECASE)


def plain_notation(text: str) -> str:
    """A text without what only says how it is set: emphasis, delimiters, spaces, wide digits."""
    text = text.translate(_WIDE).translate(_SIGNS)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{_lower_superscripts(match[0])}}}", text)
    for pattern, instead in _COMMANDS:
        text = pattern.sub(instead, text)
    text = _HTML.sub(" ", text)
    text = _POWER.sub("^", text)
    text = _PI.sub("π", _ROOT.sub(r"\\sqrt", text))
    text = text.replace("**", "").replace("__", "").replace("`", "").replace('"', "")
    text = _EMPHASIS.sub(r"\1", text)
    return _ENUMERATOR.sub(" ", text)


def _lower_superscripts(superscripts: str) -> str:
    return "".join(SUPERSCRIPTS[character] for character in superscripts)


def parse_vulgar_fraction(character: str) -> tuple[int, int] | None:
    """Numerator and denominator of a character such as ``½``, None of any other."""
    written = unicodedata.normalize("NFKC", character)
    if len(written) < 3 or "\u2044" not in written:
        return None
    numerator, _, denominator = written.partition("\u2044")
    return (int(numerator), int(denominator)) if denominator.isdigit() else None


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
