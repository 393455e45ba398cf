"""Verdict on an answer: equality with the reference answer, and final form.

A reference answer is a number, words or a letter ("Monday", "B", "10:30"), or a formula. Numbers
are read and compared exactly (`jrl.tasks.answers.numbers`), words as text, and formulas by
math-verify. If the reference answer is in final form, an answer of the same value that is
still to be worked out, such as 17 + 25, is "unevaluated".
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from .denials import (
    is_bound_after,
    is_bound_before,
    is_denied,
    is_hedged_formula,
    is_judged_wrong,
    is_list,
    is_part_before,
    is_retracted,
    last_clause,
)
from .extraction import Extracted, extract
from .notation import Token, plain_notation, space_lists, tokens_of
from .numbers import MULTIPLE, NOTHING, OPAQUE, Statement, read_statement, same_statement
from .words import is_word_answer, states_reference

Reason = Literal["correct", "wrong", "unevaluated", "unparsable"]
# Blanks that do not separate two letters or digits.
_LOOSE_BLANKS = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_JOINED = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}|,?\s+(?:and|or)\s+")
# Numbers with blanks between them, in an order.
_SEQUENCE = re.compile(r"-?\d+(?:\.\d+)?(?:\s+-?\d+(?:\.\d+)?)+")
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
          ValueError: if the reference answer cannot be read.
        """
        expected, answer = self._parse_reference(reference), extract(completion)
        if answer is None or not answer.text:
            return "unparsable"
        if answer.text == expected.text or _equals_up_to_typesetting(answer, expected.text):
            return "correct"
        if is_list(answer.text):
            return "wrong"
        if expected.words:
            right = states_reference(expected.text, answer.text, marked=answer.marked)
            return "unparsable" if right is None else "correct" if right else "wrong"
        if expected.number is not None:
            return self._judge_number(expected, expected.number, answer.text, answer.marked)
        verdict = self._judge_formula(expected, answer.text, answer.marked)
        is_hedged = verdict == "correct" and not _is_set(expected.reading)
        return "wrong" if is_hedged and is_hedged_formula(answer.text[-MAX_CONTEXT:]) else verdict

    def _read_reference(self, reference: str) -> ReferenceAnswer:
        answer = extract(reference)
        if answer is None or not answer.text:
            raise ValueError("it holds no answer")
        text = space_lists(answer.text)
        joined = _JOINED.sub(", ", text)
        if joined != text and re.search(r"\d", text) and self._symbolic.is_formula(joined):
            text = joined  # -1 or 3
        if _SEQUENCE.fullmatch(text.strip()) and read_statement(text, marked=True).kind == MULTIPLE:
            return ReferenceAnswer(answer.text, words=True)
        number = read_statement(text, marked=True, exclaims=False)
        if number.is_only_number and number.value is not None:
            final = self._rule == FINAL and number.is_final
            return ReferenceAnswer(answer.text, number=number, final=final)
        is_words = is_word_answer(text)
        is_formula = number.kind == OPAQUE or number.is_only_number or not is_words
        is_formula = is_formula and not _has_unknown_sign(plain_notation(text))
        reading = self._symbolic.read(text) if is_formula else ()
        if reading:
            final = self._symbolic.is_final(text, reading) and self._rule == FINAL
            return ReferenceAnswer(answer.text, final=final, reading=reading)
        if is_words:
            return ReferenceAnswer(answer.text, words=True)
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
        if _is_retracted(text, marked=marked):
            return "wrong"
        if _is_set(reference.reading):
            text = _JOINED.sub(", ", space_lists(text))
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
        if self._rule == FINAL:
            is_final = is_final and self._symbolic.has_form(reference.reading, reading)
        return "correct" if is_final else "unevaluated"

    def _read_equal(self, reference: Sequence[Any], text: str) -> Sequence[Any]:
        """The reading of a text if it equals the reading of the reference answer, else empty."""
        reading = self._symbolic.read(text)
        return reading if reading and self._symbolic.are_equal(reference, reading) else ()


def _is_set(reading: Sequence[Any]) -> bool:
    """True if a reading is a set of values, which may be joined by "and" or "or"."""
    return type(reading[0]).__name__ == "FiniteSet"


def _has_unknown_sign(text: str) -> bool:
    return not text.isascii() and any(
        not sign.isascii() and not sign.isalnum() and sign not in _SIGNS for sign in text
    )


def _is_retracted(text: str, *, marked: bool) -> bool:
    """True if the words around the formula of a text deny or bound it, or a mark is unknown."""
    plain = plain_notation(text[-MAX_CONTEXT:], marked=marked)
    if _has_unknown_sign(plain):
        return True
    parts = re.split(r"[.!?](?:\s+|$)|\n+", plain.strip())
    for number, part in enumerate(reversed(parts)):
        tokens = tokens_of(part)
        formula = [n for n in range(len(tokens)) if not _is_prose(tokens, n)]
        formula = [n for n in formula if tokens[n].kind not in ("stop", "comma", "currency")]
        if not formula:
            if number == 0 and is_retracted([token.text.lower() for token in tokens]):
                return True
            continue
        first = formula[0]
        before = [token.text.lower() for token in tokens[:first] if token.kind == "word"]
        after = [token.text.lower() for token in tokens[formula[-1] + 1 :] if token.kind == "word"]
        clause = last_clause(before)
        return (
            is_denied(clause)
            or is_bound_before(clause)
            or is_part_before(clause)
            or is_bound_after(after)
            or is_judged_wrong(after)
            or is_retracted(after)
            or any(word in ("dozen", "hundred", "thousand", "million") for word in after[:1])
        )
    return False


def _is_prose(tokens: Sequence[Token], index: int) -> bool:
    """True if a token is a word, and not a variable or a function."""
    token = tokens[index]
    if token.kind != "word" or token.text in _FUNCTIONS:
        return False
    if len(token.text) > 1:
        return True
    follows = tokens[index + 1] if index + 1 < len(tokens) else None
    return token.text in ("a", "A", "I") and follows is not None and len(follows.text) > 1


_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "sqrt", "lim", "pi")
_SIGNS = frozenset(
    "√±\u2013≤≥≠∞\u222a∩∈∉⊂⊆∅△∠∧\u2228¬∀∃→⇒⇔\u2032″°·\u00d7÷\uff0c。\uff1b\uff1a、\uff1f\uff01\uff08\uff09“”\u2018\u2019€£¥₹\uff04…"
) - {"¬"}
MAX_CONTEXT = 1_000
"""Number of characters of a text whose words are looked at, from its end."""


def _equals_up_to_typesetting(answer: Extracted, reference: str) -> bool:
    """True if an answer differs from a reference only in blanks and typesetting."""
    if len(answer.text) > MAX_TYPESETTING + 4 * len(reference):
        return False
    return _squeeze(answer.text, marked=answer.marked) == _squeeze(reference, marked=True)


def _squeeze(text: str, *, marked: bool) -> str:
    """A text without blanks and typesetting, for comparison character by character."""
    squeezed = _LOOSE_BLANKS.sub("", plain_notation(text, marked=marked)).strip(" $")
    return squeezed.rstrip(" $.")
