"""Verdict on an answer: equality with the reference answer, and final form.

A reference answer is a number, words or a letter ("Monday", "B", "10:30"), or a formula. Numbers
are read and compared exactly (`jrl.tasks.answers.numbers`), words as text, and formulas by
math-verify. Where the reference answer is in final form, an answer that has the same value and is
still to be worked out is "unevaluated".
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from .extraction import Extracted, extract
from .notation import plain_notation
from .numbers import NOTHING, OPAQUE, Statement, read_statement, same_statement

Reason = Literal["correct", "wrong", "unevaluated", "unparsable"]
# Blanks that do not separate two letters or digits.
_LOOSE_BLANKS = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_TAIL = re.compile(r"(?:\bis|\bare|:)\s+([^\n]{1,300}?)\.?\s*$")
MAX_TYPESETTING = 100
"""Maximum number of characters of typesetting that an answer has more than the reference."""
FINAL, EVALUATED = "final", "evaluated"
RULES = (FINAL, EVALUATED)
"""Requirements on an answer: a value in final form, or anything that has the value."""


@dataclass(frozen=True)
class ReferenceAnswer:
    """A parsed reference answer.

    Attributes:
      text: the answer itself, without the text around it.
      number: the number that it states; None if it is not a number.
      words: whether it is compared as text.
      final: whether an answer has to be in final form as well.
      reading: of a formula by math-verify.
    """

    text: str
    number: Statement | None = None
    words: bool = False
    final: bool = False
    reading: tuple = ()


class Judge:
    """Compares completions with reference answers.

    Args:
      symbolic: the module `jrl.tasks.answers.symbolic`, as this process has loaded it.
      rule: one of `RULES`.
    """

    def __init__(self, symbolic: ModuleType, rule: str = FINAL):
        if rule not in RULES:
            raise ValueError(f"answers={rule!r} is not a rule: choose one of {', '.join(RULES)}")
        self._symbolic, self._rule = symbolic, rule
        self._parse_reference = functools.lru_cache(maxsize=256)(self._read_reference)

    def __call__(self, reference: str, completion: str) -> Reason:
        """The reason of a verdict.

        Raises:
          ValueError: where the reference answer cannot be read.
        """
        expected, answer = self._parse_reference(reference), extract(completion)
        if answer is None or not answer.text:
            return "unparsable"
        if answer.text == expected.text or _equals_up_to_typesetting(answer, expected.text):
            return "correct"
        if expected.words:
            right = states_reference(expected.text, answer.text, marked=answer.marked)
            return "unparsable" if right is None else "correct" if right else "wrong"
        if expected.number is not None:
            return self._judge_number(expected, expected.number, answer.text, answer.marked)
        return self._judge_formula(expected, answer.text, answer.marked)

    def _read_reference(self, reference: str) -> ReferenceAnswer:
        answer = extract(reference)
        text = "" if answer is None else answer.text
        if not text:
            raise ValueError("it holds no answer")
        number = read_statement(text, marked=True, exclaims=False)
        if number.is_only_number and number.value is not None:
            final = self._rule == FINAL and number.is_final
            return ReferenceAnswer(text, number=number, final=final)
        is_formula = number.kind == OPAQUE or number.is_only_number
        reading = () if not is_formula and is_word_answer(text) else self._symbolic.read(text)
        if reading:
            final = self._symbolic.is_final(text, reading) and self._rule == FINAL
            return ReferenceAnswer(text, final=final, reading=reading)
        if is_word_answer(text):
            return ReferenceAnswer(text, words=True)
        raise ValueError("it holds no number, word or formula")

    def _judge_number(
        self, reference: ReferenceAnswer, number: Statement, text: str, marked: bool
    ) -> Reason:
        statement = read_statement(text, marked=marked)
        if "!" in text and not same_statement(number, statement):
            statement = read_statement(text, marked=marked, exclaims=False)
        if statement.kind == NOTHING:
            return "unparsable"
        if statement.kind == OPAQUE:
            # Its value needs more than arithmetic, for instance a logarithm.
            if not self._symbolic.is_formula(text.strip()):
                return "wrong"
            if not self._read_equal(self._symbolic.read(reference.text), text):
                return "wrong"
        elif not same_statement(number, statement):
            return "wrong"
        return "unevaluated" if reference.final and not statement.is_final else "correct"

    def _judge_formula(self, reference: ReferenceAnswer, text: str, marked: bool) -> Reason:
        number = read_statement(text, marked=marked)
        if number.scale == 1 and self._symbolic.is_rounded(number.expression, reference.reading):
            return "correct"
        reading = self._read_equal(reference.reading, text)
        if not reading:
            # "The point is (1, 2)." has its formula at its end.
            tail = _TAIL.search(text)
            if tail is None or not self._symbolic.is_formula(tail[1]):
                is_read = self._symbolic.read(text) or marked or self._symbolic.is_formula(text)
                return "wrong" if is_read else "unparsable"
            text = tail[1]
            reading = self._read_equal(reference.reading, text)
            if not reading:
                return "wrong"
        is_final = not reference.final or self._symbolic.is_final(text, reading)
        return "correct" if is_final else "unevaluated"

    def _read_equal(self, reference: Sequence[Any], text: str) -> Sequence[Any]:
        """The reading of a text that equals that of the reference answer, else empty."""
        reading = self._symbolic.read(text)
        return reading if reading and self._symbolic.are_equal(reference, reading) else ()


def _equals_up_to_typesetting(answer: Extracted, reference: str) -> bool:
    """True if an answer differs from a reference only in blanks and typesetting."""
    if len(answer.text) > MAX_TYPESETTING + 4 * len(reference):
        return False
    return _squeeze(answer.text, marked=answer.marked) == _squeeze(reference, marked=True)


def _squeeze(text: str, *, marked: bool) -> str:
    """A text without blanks and typesetting, for comparison character by character."""
    squeezed = _LOOSE_BLANKS.sub("", plain_notation(text, marked=marked)).strip(" $")
    return squeezed.rstrip(" $.")


MAX_REFERENCE_LENGTH = 200
"""Maximum length of a reference answer that is words."""
_PUNCTUATION = ".,;:!?*_'\"` \t\r\n()[]{}$"
_BLANKS = re.compile(r"\s+")
_ANCHOR = re.compile(
    r"(?:\banswer\b[^.\n]{0,40}?(?:\bis\b|\bare\b|[:=])|\b(?:is|are|be|was|choose|choice|option|"
    r"select|pick|=)(?![\w'])|=|:(?!\d))\s*(?:the\s+|an?\s+|on\s+|in\s+|option\s+|choice\s+)*",
    re.IGNORECASE,
)
# An alternative follows: "or Tuesday", ", Tuesday.", "/ Tuesday".
_GOES_ON = re.compile(
    r"\s*(?:\bor\b|(?:\band\b|[/|])\s*\w|[,;]\s*\w+\s*(?:$|[,.;!?]|\bor\b|\band\b))", re.IGNORECASE
)
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?(?:\s*[ap]\.?\s?m\.?)?", re.IGNORECASE)
_SHORT = 4
"""Maximum number of words of a text without a verb that is judged as an answer."""
_YES_NO = ("yes", "no", "true", "false")
_OPTION = re.compile(r"\(?([A-Za-z])\s*[).:]\s+\S")
_DENIED = re.compile(r"\b(?:not|isn't|never)\s*$", re.IGNORECASE)


def is_word_answer(reference: str) -> bool:
    """True if a reference answer, which states no number, is words or a letter."""
    if _CLOCK.fullmatch(reference.strip()):
        return True
    if len(reference) > MAX_REFERENCE_LENGTH or any(mark in reference for mark in "^_\\=+<>|"):
        return False
    letters = re.sub(r"[\s'.,:;!?&/-]", "", normalize_words(reference))
    return letters.isalnum() and any(map(str.isalpha, letters))


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
    plain = plain_notation(text)
    if len(wanted) == 1 and (option := _OPTION.match(plain.strip())) is not None:
        other = re.search(r"\([A-Za-z]\)|\b[A-Z][).:]\s", plain[option.end() :])
        return option[1].casefold() == wanted and other is None
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
        anchor = answer[-1] if answer else anchors[-1]
        rest = sentence[anchor.end() :].lstrip(_PUNCTUATION)
        head, after = rest[: len(wanted)], rest[len(wanted) :]
        # New York City is not New York.
        if head.casefold() != wanted or re.match(r"\w|-\w|\s+[A-Z][a-z]", after):
            return False
        denied = _DENIED.search(sentence[: anchor.start()])
        return not denied and not _GOES_ON.match(after.lstrip(".)]*'\""))
    return None
