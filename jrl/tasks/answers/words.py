"""Words and letters as answers, compared as text: "Monday", "B", "10:30"."""

import re

from .markup import plain

LONGEST = 200
"""Characters of a gold answer that is text."""
_PUNCTUATION = ".,;:!?*_'\"` \t\r\n()[]{}$"
_BLANKS = re.compile(r"\s+")
_ANCHOR = re.compile(
    r"(?:\banswer\b[^.\n]{0,40}?(?:\bis\b|\bare\b|[:=])|\b(?:is|are|be|was|choose|choice|option|"
    r"select|pick|=)(?![\w'])|=|:(?!\d))\s*(?:the\s+|an?\s+|on\s+|in\s+|option\s+|choice\s+)*",
    re.IGNORECASE,
)
# Another word is offered beside it: "or Tuesday", ", Tuesday.", "/ Tuesday".
_GOES_ON = re.compile(
    r"\s*(?:\bor\b|(?:\band\b|[/|])\s*\w|[,;]\s*\w+\s*(?:$|[,.;!?]|\bor\b|\band\b))", re.IGNORECASE
)
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?\s?m\.?)?", re.IGNORECASE)
_SHORT = 4
"""Words up to which a text without a verb is an answer, right or wrong."""
_YES_NO = ("yes", "no", "true", "false")
_OPTION = re.compile(r"\(?([A-Za-z])\s*[).:]\s+\S")
_DENIED = re.compile(r"\b(?:not|isn't|never)\s*$", re.IGNORECASE)


def is_word_answer(gold: str) -> bool:
    """True if a reference answer, which states no number, is words or a letter."""
    text = normal(gold)
    if _CLOCK.fullmatch(gold.strip()):
        return True
    if not text or len(gold) > LONGEST or any(mark in gold for mark in "^_\\=+<>|"):
        return False
    letters = re.sub(r"[\s'.,:;!?&/-]", "", text)
    return bool(letters) and letters.isalnum() and any(c.isalpha() for c in text)


def normal(text: str) -> str:
    """A text without what only sets it: marks, brackets, blanks, capitals, stops at its ends."""
    text = _BLANKS.sub(" ", plain(text)).strip(_PUNCTUATION)
    return text.casefold()


def says(gold: str, text: str, *, marked: bool) -> bool | None:
    """True if a text states the reference answer; None if it states nothing that can be read.

    Args:
      marked: whether it is known to be the answer, and no running text.
    """
    wanted, whole = normal(gold), normal(text)
    if not whole:
        return None
    if whole == wanted:
        return True
    if len(wanted) == 1 and (option := _OPTION.match(plain(text).strip())) is not None:
        others = re.findall(r"\(([A-Za-z])\)|\b([A-Z])[).:]\s", plain(text)[option.end() :])
        return option[1].casefold() == wanted and not others
    if marked:
        return False
    found = _stated(wanted, plain(text[-1_000:]))
    if found is not None:
        return found
    if wanted in _YES_NO and whole.startswith(wanted):
        rest = whole[len(wanted) :]
        return not rest[:1].isalnum() and not _GOES_ON.match(rest)
    return False if len(whole.split()) <= max(_SHORT, 2 * len(wanted.split())) else None


def _stated(wanted: str, text: str) -> bool | None:
    """True if the last sentence that states something states the wanted answer; None if no sentence
    states anything."""
    for sentence in reversed(re.split(r"(?<=[.!?])\s+|\n+", text.strip())):
        anchors = list(_ANCHOR.finditer(sentence))
        if not anchors:
            continue
        answer = [found for found in anchors if "answer" in found[0].lower()]
        chosen = answer[-1] if answer else anchors[-1]
        rest = sentence[chosen.end() :].lstrip(_PUNCTUATION)
        head = rest[: len(wanted)]
        after = rest[len(wanted) :]
        # New York City is not New York.
        longer = re.match(r"\w|-\w|\s+[A-Z][a-z]", after) is not None
        if head.casefold() != wanted or longer:
            return False
        denied = _DENIED.search(sentence[: chosen.start()]) is not None
        return not denied and _GOES_ON.match(after.lstrip(".)]*'\"")) is None
    return None
