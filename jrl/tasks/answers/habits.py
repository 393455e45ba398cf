"""Statistics of a policy's answers: their diversity, and full marks that a second reader confirms.

The second reader is stricter than any verifier. It judges completions whose reference answer is a
number: the answer must have its exact value and be in final form.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from .extraction import Extracted, extract
from .numbers import NUMBER, Statement, read_statement

MAX_FORM_LENGTH = 500
"""Characters of an answer whose form is looked at."""
_FORMS = (
    (re.compile(r"\d+(?:[.,]\d+)*"), "0"),
    (re.compile(r"[^\W\d_]+"), "a"),
    (re.compile(r"(?:a[\s,.']*)+a"), "a"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True)
class Answered:
    """A completion with its verdict.

    Attributes:
      prompt: tells its prompt from others.
      text: of the completion.
      reference: the reference answer; empty where there is none.
      correct: whether it got full marks.
    """

    prompt: Hashable
    text: str
    reference: str
    correct: bool


def answer_statistics(answered: Iterable[Answered]) -> dict[str, float]:
    """Computes statistics of the answers to the prompts of a step.

    Returns:
      ``answers/variety``: number of distinct answers that are the most frequent one of a prompt,
      over the number of prompts; ``answers/top_form``: share of the most frequent form, in which
      digits and words are left out; and where reference answers are numbers, of the completions of
      these ``answers/shared``, the share with full marks that the second reader gives too, and
      ``answers/disputed``, the share with full marks that it does not give. Empty without
      completions.
    """
    rows = list(answered)
    if not rows:
        return {}
    answers = [extract(row.text) for row in rows]
    texts = ["" if answer is None else answer.text for answer in answers]
    by_prompt: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)
    for row, text in zip(rows, texts, strict=True):
        by_prompt[row.prompt][text] += 1
    # The first of equals, which the order of completions decides.
    commonest = {max(counts, key=lambda text: counts[text]) for counts in by_prompt.values()}
    forms = Counter(form_of(text) for text in texts)
    statistics = {
        "answers/variety": len(commonest) / len(by_prompt),
        "answers/top_form": max(forms.values()) / len(rows),
    }
    numeric_answers = [
        (row.correct, answer, reference)
        for row, answer in zip(rows, answers, strict=True)
        if (reference := _reference_number(row.reference)) is not None
    ]
    if numeric_answers:
        confirmed = [
            correct and _is_confirmed(answer, reference)
            for correct, answer, reference in numeric_answers
        ]
        correct = sum(correct for correct, _, _ in numeric_answers)
        statistics["answers/shared"] = sum(confirmed) / len(numeric_answers)
        statistics["answers/disputed"] = (correct - sum(confirmed)) / len(numeric_answers)
    return statistics


def is_disputed(row: Answered) -> bool:
    """True if a completion has full marks that the second reader does not give."""
    reference = _reference_number(row.reference)
    return reference is not None and row.correct and not _is_confirmed(extract(row.text), reference)


def form_of(text: str) -> str:
    """The form of an answer: 0 for its numbers, and a for its words."""
    return _form(text[:MAX_FORM_LENGTH])


@lru_cache(maxsize=4096)
def _form(text: str) -> str:
    for pattern, instead in _FORMS:
        text = pattern.sub(instead, text)
    return text.strip()


@lru_cache(maxsize=4096)
def _reference_number(reference: str) -> Statement | None:
    """A reference answer that is a number in final form; None for any other."""
    if not reference:
        return None
    answer = extract(reference)
    statement = read_statement("" if answer is None else answer.text, marked=True, exclaims=False)
    if statement.kind != NUMBER or not statement.is_only_number or statement.value is None:
        return None
    assert statement.expression is not None
    return statement if statement.expression.final else None


def _is_confirmed(answer: Extracted | None, reference: Statement) -> bool:
    if answer is None:
        return False
    statement = _read(answer.text, answer.marked)
    if statement.kind != NUMBER or statement.expression is None or not statement.expression.final:
        return False
    return statement.digits == reference.digits or statement.value == reference.value


# The completions of a prompt are mostly of a few answers.
@lru_cache(maxsize=1024)
def _read(text: str, marked: bool) -> Statement:
    return read_statement(text, marked=marked)
