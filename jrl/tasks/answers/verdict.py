"""Verdict on an answer: equality with the reference answer, and final form.

A reference answer is a number, words, or a formula (`Kind`). Numbers are read and compared exactly
(`jrl.tasks.answers.numbers`), words as text, and formulas by math-verify. Where the reference
answer is in final form, an answer that has the same value and is still to be worked out is
"unevaluated".
"""

import functools
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from .extraction import extract
from .markup import plain
from .numbers import NOTHING, NUMBER, OPAQUE, Stated, same_statement, stated
from .words import is_word_answer, says

Reason = Literal["correct", "wrong", "unevaluated", "unparsable"]
# Those between two letters or digits part words and numbers.
_BLANKS = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
_TAIL = re.compile(r"(?:\bis|\bare|:)\s+([^\n]{1,300}?)\.?\s*$")
MOST_SETTING = 100
"""Characters that set an answer, besides those that belong to it."""
FINAL, EVALUATED = "final", "evaluated"
RULES = (FINAL, EVALUATED)
"""Requirements on an answer: a value in final form, or anything that has the value."""


@dataclass(frozen=True)
class Gold:
    """A parsed reference answer.

    Attributes:
      text: its answer, without what leads to it.
      number: what it states, None where it is no number.
      words: whether it is compared as text.
      final: whether it has nothing left to work out.
      reading: of a formula by math-verify.
    """

    text: str
    number: Stated | None = None
    words: bool = False
    final: bool = True
    reading: tuple = ()


class Judge:
    """Compares completions with reference answers.

    Args:
      symbolic: the module `jrl.tasks.answers.symbolic`, as this process has loaded it.
      rule: one of `RULES`.
    """

    def __init__(self, symbolic: ModuleType, rule: str = FINAL):
        if rule not in RULES:
            raise ValueError(f"answers={rule!r} is no rule: choose one of {', '.join(RULES)}")
        self._symbolic, self._rule = symbolic, rule
        self._gold = functools.lru_cache(maxsize=256)(self._read_gold)

    def __call__(self, gold: str, completion: str) -> Reason:
        """The reason of a verdict.

        Raises:
          ValueError: where the reference answer cannot be read.
        """
        known, answer = self._gold(gold), extract(completion)
        if answer is None or not answer.text:
            return "unparsable"
        if answer.text == known.text or _is_set_alike(answer.text, known.text):
            return "correct"
        if known.words:
            right = says(known.text, answer.text, marked=answer.marked)
            return "unparsable" if right is None else "correct" if right else "wrong"
        if known.number is not None:
            return self._of_number(known, answer.text, answer.marked)
        return self._of_formula(known, answer.text, answer.marked)

    def _read_gold(self, gold: str) -> Gold:
        answer = extract(gold)
        text = "" if answer is None else answer.text
        if not text:
            raise ValueError("it holds no answer")
        number = stated(text, marked=True, exclaims=False)
        if number.kind == NUMBER and number.alone and number.value is not None:
            assert number.expression is not None
            return Gold(text, number=number, final=number.expression.final)
        is_formula = number.kind == OPAQUE or (number.kind == NUMBER and number.alone)
        if not is_formula and is_word_answer(text):
            return Gold(text, words=True)
        reading = self._symbolic.read(text)
        if not reading:
            if is_word_answer(text):
                return Gold(text, words=True)
            raise ValueError("it holds no number, word or formula")
        return Gold(text, final=self._symbolic.is_final(text, reading), reading=reading)

    def _of_number(self, gold: Gold, text: str, marked: bool) -> Reason:
        assert gold.number is not None
        found = stated(text, marked=marked)
        if "!" in text and not same_statement(gold.number, found):
            found = stated(text, marked=marked, exclaims=False)
        if found.kind == NOTHING:
            return "unparsable"
        if found.kind == OPAQUE:
            return self._of_opaque(gold, text)
        if not same_statement(gold.number, found):
            return "wrong"
        assert found.expression is not None
        if gold.final and not found.expression.final and self._rule == FINAL:
            return "unevaluated"
        return "correct"

    def _of_opaque(self, gold: Gold, text: str) -> Reason:
        """An answer that needs more than arithmetic to be a number: a logarithm, say."""
        if not self._symbolic.is_formula(text.strip()):
            return "wrong"
        reading = self._symbolic.read(text)
        if not reading or not self._symbolic.same(self._symbolic.read(gold.text), reading):
            return "wrong"
        return "unevaluated" if gold.final and self._rule == FINAL else "correct"

    def _of_formula(self, gold: Gold, text: str, marked: bool) -> Reason:
        number = stated(text, marked=marked)
        decimal = number.expression if number.kind == NUMBER and number.scale == 1 else None
        if decimal is not None and self._symbolic.is_rounded(decimal, gold.reading):
            return "correct"
        reading = self._symbolic.read(text)
        if not reading or not self._symbolic.same(gold.reading, reading):
            # "The point is (1, 2)." has its formula at its end.
            tail = _TAIL.search(text)
            if tail is None or not self._symbolic.is_formula(tail[1]):
                says_something = reading or marked or self._symbolic.is_formula(text)
                return "wrong" if says_something else "unparsable"
            text = tail[1]
            reading = self._symbolic.read(text)
            if not reading or not self._symbolic.same(gold.reading, reading):
                return "wrong"
        if gold.final and self._rule == FINAL and not self._symbolic.is_final(text, reading):
            return "unevaluated"
        return "correct"


def _is_set_alike(text: str, gold: str) -> bool:
    """True if two texts differ only in blanks and typesetting."""
    return len(text) <= MOST_SETTING + 4 * len(gold) and _squeezed(text) == _squeezed(gold)


def _squeezed(text: str) -> str:
    """A text as it is compared letter by letter, without blanks and what only sets it."""
    return _BLANKS.sub("", plain(text)).strip(" $.")
