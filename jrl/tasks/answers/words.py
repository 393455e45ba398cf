"""Words and letters as answers, compared as text: "Monday", "B", "10:30"."""

import re

from .markup import plain_notation

MAX_REFERENCE_LENGTH = 200
"""Characters of a reference answer that is text."""
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


def is_word_answer(reference: str) -> bool:
    """True if a reference answer, which states no number, is words or a letter."""
    text = normalize(reference)
    if _CLOCK.fullmatch(reference.strip()):
        return True
    if (
        not text
        or len(reference) > MAX_REFERENCE_LENGTH
        or any(mark in reference for mark in "^_\\=+<>|")
    ):
        return False
    letters = re.sub(r"[\s'.,:;!?&/-]", "", text)
    return bool(letters) and letters.isalnum() and any(c.isalpha() for c in text)


def normalize(text: str) -> str:
    """A text without what only sets it: marks, brackets, blanks, capitals, stops at its ends."""
    text = _BLANKS.sub(" ", plain_notation(text)).strip(_PUNCTUATION)
    return text.casefold()


def states_reference(reference: str, text: str, *, marked: bool) -> bool | None:
    """True if a text states the reference answer; None if it states nothing that can be read.

    Args:
      marked: whether it is known to be the answer, and no running text.
    """
    wanted, normalized = normalize(reference), normalize(text)
    if not normalized:
        return None
    if normalized == wanted:
        return True
    if len(wanted) == 1 and (option := _OPTION.match(plain_notation(text).strip())) is not None:
        others = re.findall(
            r"\(([A-Za-z])\)|\b([A-Z])[).:]\s", plain_notation(text)[option.end() :]
        )
        return option[1].casefold() == wanted and not others
    if marked:
        return False
    is_stated = _states_last(wanted, plain_notation(text[-1_000:]))
    if is_stated is not None:
        return is_stated
    if wanted in _YES_NO and normalized.startswith(wanted):
        rest = normalized[len(wanted) :]
        return not rest[:1].isalnum() and not _GOES_ON.match(rest)
    return False if len(normalized.split()) <= max(_SHORT, 2 * len(wanted.split())) else None


def _states_last(wanted: str, text: str) -> bool | None:
    """True if the last sentence that states something states the wanted answer; None if no sentence
    states anything."""
    for sentence in reversed(re.split(r"(?<=[.!?])\s+|\n+", text.strip())):
        anchors = list(_ANCHOR.finditer(sentence))
        if not anchors:
            continue
        answer = [anchor for anchor in anchors if "answer" in anchor[0].lower()]
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
