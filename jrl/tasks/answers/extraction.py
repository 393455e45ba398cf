"""Extraction of the answer from a completion, for all tasks.

Only the text after the end of reasoning is searched. The answer is the last complete
``\\boxed{...}`` or ``<answer>...</answer>`` in it, else the line of the last ``####``, else all of
it. A completion whose reasoning is never closed has no answer, and a box that is never closed is
ignored. The time is linear in the length of the text.
"""

import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from .denials import is_judged_wrong, is_verdict, is_withdrawn, words_of
from .reasoning import BLANKS, after_reasoning

UNREADABLE = "\ufffd"
"""Character in place of a special token in a completion."""
HASHES = re.compile(r"(?<!#)####(?!#)")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|\{|\}", re.DOTALL)
_TAG = re.compile(r"<(/?)answer\s*>", re.IGNORECASE)
_HEADING = re.compile(
    r"[\s*_]*(?:the\s+)?(?:final\s+)?(?:answer|solution|result|conclusion)?[\s*_:]*", re.IGNORECASE
)
# Text between two boxes that form one statement: blanks, commas, "and", "or", a label.
_BOX_SEPARATOR = re.compile(
    r"(?:[\s$,;/&~.]|\\[()\[\],;]|\\q?quad|\\lor\b|\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b"
    r"|[A-Za-z]\w?\s*=)*"
)
_OR = re.compile(
    r"\bor\b|/|\\lor\b|\b(?:maybe|perhaps|possibly|alternatively|vs|versus)\b", re.IGNORECASE
)
# Text between two marks of which one is offered instead of the other: "or maybe".
_ALTERNATIVE = re.compile(
    r"(?:[\s$,;/&~.?!:*_-]|\\[()\[\],;]|\\q?quad|\\lor\b|\\text\s*\{\s*(?:and|or)\s*\}"
    r"|(?:and|or|maybe|perhaps|possibly|alternatively|vs|versus|also|even|else|it|is|the|answer|be"
    r"|could|might|may|either|just|as|well|possible)\b|[A-Za-z]\w?\s*=)*",
    re.IGNORECASE,
)
_JOINED = re.compile(r"[\s$]*(?:,|;|&|/|\band\b|\bor\b)[\s$]*", re.IGNORECASE)
# "not" before a mark.
_DENIED = re.compile(r"(?:\b(?:not|never)|n['\u2019]t)[\s$*_:(\[\\]*$", re.IGNORECASE)
_OR_ANOTHER = re.compile(
    r"[\s$*_.,]*\bor\s+(?:(?:maybe|perhaps|possibly|else|it's|it is|rather)\s+)*(?:the\s+)?"
    r"(?:former|latter|first|second|other|previous|earlier|one before)\b",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r"[\s$*_()\\\])]*(?:,\s*(?:which|that|but (?:this|that|it))\s+)?([^.,;:!?\n]*)"
)
MAX_BESIDE = 100
"""Maximum number of characters beside a mark that are read."""
MAX_BETWEEN_BOXES = 40
"""Maximum number of characters between two boxes of one statement."""
MAX_NESTED_MARKUP = 8


@dataclass(frozen=True)
class Extracted:
    """An extracted answer.

    Attributes:
      text: the answer, stripped of blanks; empty if there is none.
      marked: whether a box, a tag or a line of ``####`` marks it as the answer.
    """

    text: str
    marked: bool


def extract(completion: str, *, bare: bool = False) -> Extracted | None:
    """The answer in a completion; None if its reasoning is not closed.

    Args:
      bare: whether answers of the task consist of a few characters, perhaps with "#" among them.
        ``####`` is then no mark, and a completion without marks and without reasoning is the
        answer as it is, blanks included.
    """
    answer = after_reasoning(completion)
    if answer is None:
        return None
    marked = False
    for _ in range(MAX_NESTED_MARKUP):
        inner = _last_marked_text(answer, hashes=not bare)
        if inner is None:
            break
        answer, marked = inner, True
    if bare and answer == completion:
        return Extracted(answer, marked)
    return Extracted(answer.strip(BLANKS + UNREADABLE), marked)


def _last_marked_text(text: str, *, hashes: bool) -> str | None:
    """Text of the last statement in boxes or tags, else of the last ``####`` if `hashes`; None if
    nothing is marked, and empty if the words at the mark take it back."""
    markers = _outermost_markers(text)
    if markers:
        last = markers[-1]
        return "" if _is_withdrawn(text, last.begin, last.end) else _join_statement(text, markers)
    last_hashes = deque(HASHES.finditer(text) if hashes else (), maxlen=1)
    if not last_hashes:
        return None
    line, _, rest = text[last_hashes[0].end() :].lstrip(" \t").partition("\n")
    # A Markdown heading looks the same; the answer is then the text below it.
    return rest if _HEADING.fullmatch(line) else line


def _is_withdrawn(text: str, begin: int, end: int) -> bool:
    """True if the words at a mark deny its answer or offer another: "is wrong", "or the former"."""
    before, behind = text[max(0, begin - MAX_BESIDE) : begin], text[end : end + MAX_BESIDE]
    if _DENIED.search(before) or _OR_ANOTHER.match(behind):
        return True
    clause = _CLAUSE.match(behind)
    words = re.findall(r"[\w']+", clause[1].lower().replace("\u2019", "'")) if clause else []
    if is_withdrawn(words_of(behind)):
        return True
    return bool(words) and is_verdict(words[0]) and is_judged_wrong(words, is_bare=False)


class _Mark(NamedTuple):
    """Begin, end and content of a box or a tag."""

    begin: int
    end: int
    content: str
    is_tag: bool


def _outermost_markers(text: str) -> list[_Mark]:
    """The complete boxes and tags of a text that are not inside another, in its order."""
    markers: list[_Mark] = []
    for mark in sorted([*_boxes(text), *_tags(text)], key=lambda each: (each.begin, -each.end)):
        if not markers or mark.begin >= markers[-1].end:
            markers.append(mark)
    return markers


def _join_statement(text: str, markers: list[_Mark]) -> str:
    """Content of the last mark, joined to the marks before it of the same statement."""
    last = markers.pop()
    answer, begin, is_tag = last.content, last.begin, last.is_tag
    while markers:
        before = markers.pop()
        between = text[before.end : begin]
        is_alternative = _OR.search(between) and _ALTERNATIVE.fullmatch(between)
        separator = _JOINED if is_tag or before.is_tag else _BOX_SEPARATOR
        if len(between) > MAX_BETWEEN_BOXES or not (is_alternative or separator.fullmatch(between)):
            break
        joint = " or " if _OR.search(between) else ", "
        answer, begin, is_tag = before.content + joint + answer, before.begin, before.is_tag
    return answer


def _boxes(text: str) -> list[_Mark]:
    """The complete boxes that are not inside another box."""
    # Position of each open brace, and of its content if it opens a box, else -1.
    opened: list[tuple[int, int]] = []
    boxes: list[_Mark] = []
    if "boxed" not in text and "fbox" not in text:
        return boxes
    for match in _BRACES.finditer(text):
        brace = match[0]
        if brace == "}":
            begin, content = opened.pop() if opened else (-1, -1)
            if content >= 0:
                # Boxes inside it are part of its content.
                while boxes and boxes[-1].begin > begin:
                    boxes.pop()
                boxes.append(_Mark(begin, match.end(), text[content : match.start()], False))
        elif brace[-1] == "{" and len(brace) != 2:
            opened.append((match.start(), match.end() if len(brace) > 1 else -1))
    return boxes


def _tags(text: str) -> list[_Mark]:
    """The complete pairs of answer tags."""
    begin, tags = None, []
    for match in _TAG.finditer(text):
        if not match[1]:
            begin = match
        elif begin is not None:
            content = text[begin.end() : match.start()]
            tags.append(_Mark(begin.start(), match.end(), content, True))
            begin = None
    return tags
