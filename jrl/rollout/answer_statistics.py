"""Statistics of a policy's answers: their diversity, and full marks that a second reader confirms.

The second reader is stricter than any verifier. It judges completions whose reference answer is a
number: the answer must have its exact value and be in final form.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from jrl.tasks.answers.extraction import Extracted, extract
from jrl.tasks.answers.numbers import Statement, read_statement

# Most completions of a prompt share a few answers.
_read = lru_cache(maxsize=1024)(read_statement)
MAX_FORM_LENGTH = 500
"""Number of characters from the start of an answer that determine its form."""
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
      prompt: identity of its prompt.
      text: of the completion.
      reference: the reference answer, for example "42"; empty for a prompt that has none.
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
    # Of equally frequent answers, the answer of the first completion.
    commonest = {counts.most_common(1)[0][0] for counts in by_prompt.values()}
    forms = Counter(form_of(text) for text in texts)
    statistics = {
        "answers/variety": len(commonest) / len(by_prompt),
        "answers/top_form": max(forms.values()) / len(rows),
    }
    # Full marks, and full marks that are confirmed, if the reference answer is a number.
    numeric = [
        (row.correct, row.correct and _is_confirmed(answer, reference))
        for row, answer in zip(rows, answers, strict=True)
        if (reference := _reference_number(row.reference)) is not None
    ]
    if numeric:
        num_correct, num_confirmed = map(sum, zip(*numeric, strict=True))
        statistics["answers/shared"] = num_confirmed / len(numeric)
        statistics["answers/disputed"] = (num_correct - num_confirmed) / len(numeric)
    return statistics


def is_disputed(row: Answered) -> bool:
    """True if a completion has full marks that the second reader does not give."""
    reference = _reference_number(row.reference)
    return reference is not None and row.correct and not _is_confirmed(extract(row.text), reference)


def form_of(text: str) -> str:
    """The form of an answer: its text with 0 for each number and a for its words."""
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
    is_exact = statement.is_only_number and statement.value is not None
    return statement if is_exact and statement.is_final else None


def _is_confirmed(answer: Extracted | None, reference: Statement) -> bool:
    if answer is None:
        return False
    statement = _read(answer.text, marked=answer.marked)
    is_equal = statement.digits == reference.digits or statement.value == reference.value
    return statement.is_final and is_equal
