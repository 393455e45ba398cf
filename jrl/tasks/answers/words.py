"""Answers that are words or letters: "Monday", "B", "yes", "10:30".

In running text the word after the last "answer is" (or "answer:") is the answer, whatever later
sentences say. Without these words it is the one with which the text begins ("B, because ..."), or
the one that its last statement names ("so it is B"). It must be the only one: "B or C", "yes and
no" and "Monday? Or Tuesday?" state none.
"""

import re
import unicodedata
from collections.abc import Iterator

from .denials import (
    is_correction,
    is_denied,
    is_hedged,
    is_judged_wrong,
    is_offered_behind,
    is_part_before,
    is_retracted,
    last_clause,
)
from .notation import DASH, plain_notation

MAX_REFERENCE_LENGTH = 200
"""Maximum length of a reference answer that is words."""
MAX_LENGTH = 1_000
"""Number of characters of running text that are read, from its end."""
_PUNCTUATION = ".,;:!?*_'\"` \t\r\n()[]{}$"
_BLANKS = re.compile(r"\s+")
_ARTICLES = (
    r"(?:the\s+|an?\s+(?!\s*[).]|$)|on\s+|in\s+|option\s+|choice\s+|letter\s+|definitely\s+"
    r"|therefore\s+|thus\s+|indeed\s+|clearly\s+)*"
)
_STRONG = re.compile(
    r"(?:\b(?:answer|solution)\b[^.\n]{0,40}?(?:\bis\b|\bare\b|\bbe\b|[:=]|\s[-\u2013;]\s)"
    r"|\banswer\b[\s*_]*\n"
    rf"|(?m:^\s*(?:A|Ans)\s*:))[\s*:]*{_ARTICLES}",
    re.IGNORECASE,
)
_WEAK = re.compile(
    r"(?:\b(?:is|are|be|was|it's|that's|choose|choice|option|select|pick|say|so|hence|thus"
    r"|therefore|leaving|leaves|go with)"
    r"(?![\w'])|\bnot\b[^.?!\n]{1,40}\bbut\b(?: rather)?|\?\s*no\b|=|:(?!\d))\s*" + _ARTICLES,
    re.IGNORECASE,
)
# A second word in a list: "and Tuesday", ", Tuesday.", a line of its own.
_NEXT = re.compile(
    r"\s*(?:(?:\band\b|[/|&])\s*\w|\n\s*(?:[-*]\s*)?\w+[.\s]*$|[,;]\s*\w+\s*(?:$|[,.;!?]|\b(?:or|and)\b)"
    r"|\?\s*(?:no|not)\b)",
    re.IGNORECASE,
)
_REASON = re.compile(r"\s*(?:$|[,.;:!)\n\u2013-]|because\b|since\b|as\b|for\b)", re.IGNORECASE)
_RIGHT = re.compile(
    r"[\s*).:]*(?:is|would be|must be|seems|looks)\s+(?:the\s+|my\s+)?(?:\w+\s+)?"
    r"(?:answer|correct|right|best|choice|option|true)\b",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"\b(?:wait|actually|but|however|sorry|or|no|not|instead)\b", re.IGNORECASE)
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?\s?m\.?)?", re.IGNORECASE)
_SHORT = 4
"""Maximum number of words of a text that is an answer though it has no verb."""
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_POLAR = re.compile(
    r"(?<![\w-])(?:yes|true|false)\b"
    r"|(?<![\w-])no\b(?=\s*(?:$|[,.;:!?)\n/|&]|(?:because|since|as|or|and|yes|is|isn't|unless)\b))",
    re.IGNORECASE,
)
_NO_BESIDE = re.compile(r"(?:^|(?<=\s))no(?:\W*$)", re.IGNORECASE)
"""The answer "no" beside another one: "no/yes", "no yes"."""
_LETTER = re.compile(r"[\s$(\[*\"']*([A-Z])(?![\w'-])(?!\s+(?:think|am|would|will|have)\b)")
_OPTION = re.compile(
    r"\W*(?:option\s+|choice\s+)?([A-Za-z])\s*(?:[).:]|\s[-\u2013;]\s|,|\n|$)", re.IGNORECASE
)
_OPTION_MARK = re.compile(r"\([A-Za-z]\)|\b[A-Z][).:]\s")
_SINGLE_LETTERS = re.compile(
    r"\(([A-Za-z])\)|(?<![\w'.])(?<!\w-)([B-HJ-Z]|A(?=\s*(?:$|[().,;:!?/|&]"
    r"|(?:or|and|as well|unless|because|since)\b)))(?![\w'])"
)
_TWO_LETTERS = re.compile(r"(?<![\w'])[A-Z]\)?\s*(?:\b(?:or|and|nor)\b|[,/&])\s*\(?[A-Z](?![\w'])")
# A rejected answer beside the stated one: "B, not A", "B (not A)".
_CONTRAST = re.compile(
    r"(?<=[\w)*\"])(?:\s*[,(]\s*(?:and\s+)?(?:not|rather than|instead of)|\s+(?:and not|rather than"
    r"|instead of))\s+[\w()'*]{1,30}(?=\s*(?:[.!?;,\n]|$))",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"(?:\s*(?:sure|well|hmm+|okay|ok|of course|certainly|clearly|definitely|obviously"
    r"|let's (?:see|think(?: step by step)?))[\s,.!:]+)+",
    re.IGNORECASE,
)
_SYMBOLS = {"So", "Sm", "No", "Lo"}


def is_word_answer(reference: str) -> bool:
    """True if a reference answer, which states no number, is words or a letter."""
    if _CLOCK.fullmatch(reference.strip()):
        return True
    text = normalize_words(reference)
    if len(text) > MAX_REFERENCE_LENGTH or any(mark in text for mark in "^_\\=+<>|{}"):
        return False
    words = re.findall(r"[^\W\d_]+", text)
    if re.search(r"[-/]", text) and all(len(word) == 1 for word in words):
        return False  # p - q, -x
    signs = re.sub(r"[\s'.,:;!?&/()-]", "", text)
    return any(_is_letter(sign) for sign in signs) and all(
        sign.isalnum() or _is_letter(sign) for sign in signs
    )


def _is_letter(sign: str) -> bool:
    return sign.isalpha() or (not sign.isascii() and unicodedata.category(sign) in _SYMBOLS)


def normalize_words(text: str) -> str:
    """A text in lower case without typesetting, marks, brackets, blanks and stops at its ends."""
    return _BLANKS.sub(" ", plain_notation(text)).strip(_PUNCTUATION).casefold()


def states_reference(reference: str, text: str, *, marked: bool) -> bool | None:
    """True if a text states the reference answer; None if it states nothing that can be read.

    Args:
      marked: whether the text is marked as the answer; otherwise it is running text.
    """
    wanted, normalized = normalize_words(reference), normalize_words(text)
    if not normalized:
        return None
    if normalized == wanted:
        return True
    plain = plain_notation(text[-MAX_LENGTH:], marked=marked)
    plain = _CONTRAST.sub("", _FILLER.sub("", plain, 1) if _FILLER.match(plain) else plain)
    if normalize_words(plain) == wanted:
        return True
    if plain.lstrip()[:1] in ("-", DASH):
        return False  # -x is not x
    if len(wanted) == 1 and wanted.isalpha():
        is_stated = _states_letter(wanted, plain)
    elif wanted in _OPPOSITES:
        is_stated = _states_polar(wanted, plain)
    else:
        is_stated = _states_words(wanted, plain)
    if is_stated is not None:
        return is_stated and not _is_hedged(wanted, plain)
    is_short = len(normalized.split()) <= max(_SHORT, 2 * len(wanted.split()))
    return False if marked or is_short else None


def _is_hedged(wanted: str, text: str) -> bool:
    """True if another answer is offered beside the last place that names the wanted one."""
    occurrences = list(
        re.finditer(rf"(?<![\w'-]){re.escape(wanted)}(?![\w'-])", text, re.IGNORECASE)
    )
    if not occurrences:
        return False
    before = text[: occurrences[-1].start()]
    if wanted in _OPPOSITES:
        before = before.replace("?", ".")  # Is it yes? No.
    return is_hedged(before, text[occurrences[-1].end() :])


def _claims(text: str, anchor: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Text before each anchor in its clause, and all text behind it; the last anchor first."""
    for match in reversed(list(anchor.finditer(text))):
        clause = re.split(r"[.!?,;\n]", text[: match.start()])[-1]
        before = "" if match[0].startswith("?") else f"{clause} {match[0]}"
        yield before, text[match.end() :]


def _is_stated(wanted: str, before: str, rest: str) -> bool:
    """True if the text behind an anchor begins with the wanted answer alone."""
    rest = rest.lstrip(_PUNCTUATION)
    after = rest[len(wanted) :]
    if rest[: len(wanted)].casefold() != wanted or re.match(r"\w|[-'\u2019]\w", after):
        return False
    # New York City is not New York.
    if len(wanted) > 1 and re.match(r"\s+[A-Z][a-z]", after):
        return False
    return not _goes_on(after) and not _denied(before)


def _denied(before: str) -> bool:
    words = last_clause(re.findall(r"[\w']+|[=:]", before.lower()))
    return is_denied(words) or is_part_before(words)


def _goes_on(after: str) -> bool:
    """True if the text behind an answer names another one, or takes it back."""
    after = after.lstrip(")]*'\"")
    if _NEXT.match(after) or is_offered_behind(after, near=3):
        return True
    clause = re.split(r"[.,;:!?\n()]|\b(?:because|since|as|for)\b", after, maxsplit=1)[0]
    if is_judged_wrong(re.findall(r"[\w']+", clause.lower())):
        return True
    if clause.strip():
        return False
    words = re.findall(r"[\w']+", after.lower())[:12]
    if is_correction(words):
        return True
    behind = re.split(r"[.,;:!?\n()]+", after, maxsplit=2)[1:2]
    words = re.findall(r"[\w']+", behind[0].lower())[:12] if behind else []
    return bool(words) and is_retracted(words)


def _states_words(wanted: str, text: str) -> bool | None:
    for before, rest in _claims(text, _STRONG):
        if not _denied(before):
            return _is_stated(wanted, before, rest)
    begin = text.lstrip(_PUNCTUATION)
    after = begin[len(wanted) :]
    if begin[: len(wanted)].casefold() == wanted and (
        _RIGHT.match(after) or (_REASON.match(after) and not _CORRECTED.search(after))
    ):
        return not _goes_on(after)
    stated = re.compile(rf"(?<![\w'-]){re.escape(wanted)}(?![\w'-])", re.IGNORECASE)
    for match in reversed(list(stated.finditer(text))):
        is_joined = re.search(r"\b(?:or|and|not|nor)\s*$", text[: match.start()])
        if not is_joined and _RIGHT.match(text[match.end() :]):
            return not _goes_on(text[match.end() :])
    for before, rest in _claims(text, _WEAK):
        return _is_stated(wanted, before, rest)
    return None


def _states_polar(wanted: str, text: str) -> bool | None:
    for before, rest in _claims(text, _STRONG):
        if not _denied(before) and re.match(r"\W*(?:yes|no|true|false)\b", rest, re.IGNORECASE):
            return _is_stated(wanted, before, rest)
    stated = [
        match
        for match in _POLAR.finditer(text)
        if not _denied(_NO_BESIDE.sub("", re.split(r"[.!?,;\n]", text[: match.start()])[-1]))
    ]
    refuted = {match[0].lower() for match in stated if _is_refuted(text[match.end() :])}
    if wanted in refuted:
        return False  # No? No.
    options = {match[0].lower() for match in stated} - refuted
    relevant = options & {wanted, _OPPOSITES[wanted]}
    if not relevant:
        return False if _POLAR.search(text) else None
    return relevant == {wanted} and not re.search(r"\bunless\b", text)


def _is_refuted(after: str) -> bool:
    """True if the text behind an answer calls it wrong: "is wrong", "? No"."""
    clause = re.split(r"[.,;:!?\n()]+", after, maxsplit=1)[0]
    words = re.findall(r"[\w']+", clause.lower())
    return (len(words) > 1 and is_judged_wrong(words)) or bool(
        re.match(
            r"\W*\?\s*(?:no|wrong|not)\b|[\s.!,;]*(?:no,? that|that is not|that's (?:not|wrong))",
            after,
            re.IGNORECASE,
        )
    )


def _states_letter(wanted: str, text: str) -> bool | None:
    for anchor in (_STRONG, _WEAK):
        for before, rest in _claims(text, anchor):
            if not _denied(before) and (letter := _LETTER.match(rest) or _lone(rest)):
                after = rest[letter.end() :]
                is_wanted = letter[1].casefold() == wanted
                return is_wanted and not _goes_on(after)
    for letter in reversed(list(re.finditer(r"(?<![\w'])\(?([A-Z])\)?(?![\w'])", text))):
        if _RIGHT.match(text[letter.end() :]):
            return letter[1].casefold() == wanted and not re.search(
                r"\b(?:and|or)\W*$", text[: letter.start()]
            )
    if (option := _OPTION.match(text)) is not None:
        rest = text[option.end() - option[0].endswith((",", "\n")) :]
        other = _OPTION_MARK.search(rest)
        return option[1].casefold() == wanted and other is None and not _goes_on(rest)
    letters = list(_SINGLE_LETTERS.finditer(text))
    if len(letters) != 1 or _TWO_LETTERS.search(text):
        return False if letters else None
    clause = re.split(r"[.!?,;\n]", text[: letters[0].start()])[-1]
    is_wanted = (letters[0][1] or letters[0][2]).casefold() == wanted
    return is_wanted and not _denied(clause) and not _goes_on(text[letters[0].end() :])


def _lone(rest: str) -> re.Match[str] | None:
    """A small letter by itself behind an anchor: "(b)", "b."."""
    return re.match(r"[\s$(\[*\"']*([a-z])(?=[\s$*]*(?:[).,;!?\]]|$))", rest)
