"""Extraction of the answer from a completion, for all tasks.

Only the text after the end of reasoning is searched. The answer is the last complete
``\\boxed{...}`` or ``<answer>...</answer>`` in it, else the line of the last ``####``, else all of
it. A completion whose reasoning is never closed has no answer, and a box that is never closed is
ignored. The time is linear in the length of the text.
"""

import re
from dataclasses import dataclass

from jrl.tasks.answers.reasoning import BLANKS, after_reasoning

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
    r"(?:[\s$,;/&~.]|\\[()\[\],;]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b"
    r"|[A-Za-z]\w?\s*=)*"
)
_OR = re.compile(r"\bor\b|/")
MAX_BETWEEN_BOXES = 40
"""Maximum number of characters between two boxes of one statement."""
MAX_NESTED_MARKUP = 8


@dataclass(frozen=True)
class Extracted:
    """An extracted answer.

    Attributes:
      text: of the answer, without surrounding blanks; empty if there is none.
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


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _last_marked_text(text: str, *, hashes: bool) -> str | None:
    """Text of the last box or tag, else of the last ``####`` if `hashes`; None without any."""
    box, tag = _last_boxes(text), _last_tag(text)
    if box is not None and (tag is None or box[0] > tag[0]):
        return box[1]
    if tag is not None:
        return tag[1]
    mark = _last_match(HASHES, text) if hashes else None
    if mark is None:
        return None
    line, _, rest = text[mark.end() :].lstrip(" \t").partition("\n")
    # A Markdown heading looks the same; the answer is then the text below it.
    return rest if _HEADING.fullmatch(line) else line


def _last_boxes(text: str) -> tuple[int, str] | None:
    """End of the last complete box, and its text with that of the boxes before it that belong to
    it; None without a box."""
    # For each open brace: its position, and that of the content of a box, -1 for other braces.
    opened: list[tuple[int, int]] = []
    boxes: list[tuple[int, int, str]] = []
    for match in _BRACES.finditer(text):
        brace = match[0]
        if brace == "}":
            begin, content = opened.pop() if opened else (-1, -1)
            if content >= 0:
                # Boxes inside it are part of its content.
                while boxes and boxes[-1][0] > begin:
                    boxes.pop()
                boxes.append((begin, match.end(), text[content : match.start()]))
        elif brace[-1] == "{" and len(brace) != 2:
            opened.append((match.start(), match.end() if len(brace) > 1 else -1))
    if not boxes:
        return None
    begin, end, answer = boxes.pop()
    while boxes:
        before = boxes.pop()
        between = text[before[1] : begin]
        if len(between) > MAX_BETWEEN_BOXES or _BOX_SEPARATOR.fullmatch(between) is None:
            break
        joint = " or " if _OR.search(between) else ", "
        answer, begin = before[2] + joint + answer, before[0]
    return end, answer


def _last_tag(text: str) -> tuple[int, str] | None:
    """End of the last complete pair of answer tags, and its content; None without one."""
    begin, last = None, None
    for match in _TAG.finditer(text):
        if not match[1]:
            begin = match.end()
        elif begin is not None:
            last, begin = (match.end(), text[begin : match.start()]), None
    return last
