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
from .numbers import NUMBER, Stated, stated

LONGEST = 500
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
      gold: the reference answer; empty where there is none.
      correct: whether it got full marks.
    """

    prompt: Hashable
    text: str
    gold: str
    correct: bool


def habits(answered: Iterable[Answered]) -> dict[str, float]:
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
    found = {
        "answers/variety": len(commonest) / len(by_prompt),
        "answers/top_form": max(forms.values()) / len(rows),
    }
    numbers = [
        (row.correct, answer, gold)
        for row, answer in zip(rows, answers, strict=True)
        if (gold := _number(row.gold)) is not None
    ]
    if numbers:
        shares = [correct and _shares(answer, gold) for correct, answer, gold in numbers]
        correct = sum(correct for correct, _, _ in numbers)
        found["answers/shared"] = sum(shares) / len(numbers)
        found["answers/disputed"] = (correct - sum(shares)) / len(numbers)
    return found


def is_disputed(row: Answered) -> bool:
    """True if a completion has full marks that the second reader does not give."""
    gold = _number(row.gold)
    return gold is not None and row.correct and not _shares(extract(row.text), gold)


def form_of(text: str) -> str:
    """The form of an answer: 0 for its numbers, and a for its words."""
    return _form(text[:LONGEST])


@lru_cache(maxsize=4096)
def _form(text: str) -> str:
    for pattern, instead in _FORMS:
        text = pattern.sub(instead, text)
    return text.strip()


@lru_cache(maxsize=4096)
def _number(gold: str) -> Stated | None:
    """A reference answer that is a number in final form; None for any other."""
    if not gold:
        return None
    answer = extract(gold)
    found = stated("" if answer is None else answer.text, marked=True, exclaims=False)
    if found.kind != NUMBER or not found.alone or found.value is None:
        return None
    assert found.expression is not None
    return found if found.expression.final else None


def _shares(answer: Extracted | None, gold: Stated) -> bool:
    if answer is None:
        return False
    found = _read(answer.text, answer.marked)
    if found.kind != NUMBER or found.expression is None or not found.expression.final:
        return False
    return found.digits == gold.digits or found.value == gold.value


# The completions of a prompt are mostly of a few answers.
@lru_cache(maxsize=1024)
def _read(text: str, marked: bool) -> Stated:
    return stated(text, marked=marked)
