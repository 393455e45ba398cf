"""Check of a verifier: wrong answers that it rewards, and right ones that it does not."""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from jrl.tasks.answers.numbers import read_statement
from jrl.tasks.answers.verdict import FINAL
from jrl.tasks.data.files import KINDS
from jrl.tasks.load import load_task
from jrl.tasks.mixture import has_environments
from jrl.tasks.references import is_code_reference, parse_reference
from jrl.tasks.rewards import CustomReward
from jrl.tasks.task import Example, Task
from jrl.tasks.workers.process import Message

VERDICTS = ("right", "wrong", "unparsable")
UNEVALUATED = "unevaluated"


@dataclass(frozen=True)
class Case:
    """An answer and a reference answer.

    Attributes:
      kind: kind of the answer, for example "a bound".
      reference: the reference answer.
      completion: the answer.
      verdict: one of `VERDICTS`.
      unevaluated: whether it has the right value, and is wrong only because it is unevaluated.
      because: reason for a verdict that is debatable; else "".
    """

    kind: str
    reference: str
    completion: str
    verdict: str
    unevaluated: bool = False
    because: str = ""


@cache
def load_cases() -> tuple[Case, ...]:
    """All of the table, in its order."""
    table = tomllib.loads(files("jrl.tasks").joinpath("cases.toml").read_text(encoding="utf-8"))
    return tuple(
        Case(
            group["kind"],
            group["gold"],
            completion,
            "wrong" if verdict == UNEVALUATED else verdict,
            verdict == UNEVALUATED,
            group.get("because", {}).get(completion, ""),
        )
        for group in table["cases"]
        for verdict in (*VERDICTS, UNEVALUATED)
        for completion in group.get(verdict, ())
    )


MAX_OTHERS = 5
ATTACKS = {
    "nothing": "",
    "a blank": " ",
    "no answer": "I do not know.",
    "the prompt again": "{prompt}",
    "another answer": "{other}",
    "two answers": "{reference} or {other}",
    "two answers, in reverse order": "{other} or {reference}",
    "a list of guesses": "{others}, {reference}",
    "two boxes": r"\boxed{{{reference}}} or \boxed{{{other}}}",
    "reasoning that is not ended": "<think>It is {reference}.",
    "another answer after reasoning": "<think>{reference}</think>{other}",
    "digits by the thousand": "9" * 5_000,
    "all small numbers": " ".join(map(str, range(1_000))),
    "garbage": "?!((([[{{{{",
}
"""Completions, made from a prompt, its reference answer and other prompts' answers."""
NUMBER_ATTACKS = {
    "still to be worked out": "{reference} + 0",
    "a bound": "more than {reference}",
    "a denial": "not {reference}",
    "an interval": "[{reference}, {reference}9]",
}
"""Attacks for reference answers that are numbers."""


def attacks_on(examples: Sequence[Example]) -> list[tuple[Example, Case]]:
    """Attacks on each example whose reference answer differs from the answers of some others."""
    attacked = []
    for example in examples:
        reference = example.answer
        answers = dict.fromkeys(each.answer for each in examples)
        others = [answer for answer in answers if answer not in ("", reference)][:MAX_OTHERS]
        if not reference or not others:
            continue
        number = read_statement(reference, marked=True)
        is_number = number.is_only_number and number.digits == reference
        parts = {"prompt": example.prompt, "reference": reference}
        parts |= {"other": others[0], "others": ", ".join(others)}
        for kind, attack in (ATTACKS | (NUMBER_ATTACKS if is_number else {})).items():
            attacked.append((example, Case(kind, reference, attack.format(**parts), "wrong")))
        attacked.append((example, Case("the reference answer", reference, reference, "right")))
    return attacked


PROMPTS = 8
"""Number of prompts of a task that are attacked."""
MAX_LISTED = 20
"""Maximum number of answers of a group that are printed."""
Score = Callable[[Sequence[tuple[Example, str]]], list[float]]
"""Scores of completions; NaN is a failure."""


@dataclass(frozen=True)
class Finding:
    """A case with its scores.

    Attributes:
      case: the answer, with the verdict that it should have.
      score: score of the answer.
      full: score of the reference answer.
      none: score of an empty completion.
    """

    case: Case
    score: float
    full: float
    none: float

    @property
    def gamed(self) -> bool:
        """True if a wrong answer scores as much as the reference answer."""
        return self.case.verdict != "right" and self.score >= self.full

    @property
    def partly(self) -> bool:
        """True if a wrong answer scores more than an empty one, and less than the reference
        answer."""
        return self.case.verdict != "right" and self.none < self.score < self.full

    @property
    def missed(self) -> bool:
        """True if a right answer scores less than the reference answer, or its scoring failed."""
        return self.case.verdict == "right" and not self.score >= self.full


def check(
    target: str, *, seed: int = 0, answers: str = FINAL, seconds: float = 5.0
) -> list[Finding]:
    """Scores the table of cases and the attacks by a task, or by a custom reward.

    Args:
      target: as of `load_task`, a file of prompts, or ``path/to/file.py:reward``.
      seed: seed of the prompts that are attacked.
      answers: as of `load_task`.
      seconds: time limit of one call of a custom reward.

    Returns:
      A finding for each case, in the order of table and attacks.

    Raises:
      ValueError: if there is no such task or reward, or an environment scores it.
    """
    with _open_scorer(target, seed, answers, seconds) as (score, task):
        pairs: list[tuple[Example, Case]] = []
        # A file's answers are compared with any reference answer, not with its own prompts'
        # answers.
        if task is None or _spec(target).partition(":")[0] in KINDS:
            pairs += [(_example(case), case) for case in load_cases()]
        if task is not None:
            examples = [task.train(index) for index in range(PROMPTS)]
            pairs += attacks_on(list({example.prompt: example for example in examples}.values()))
        if not pairs:
            raise ValueError(
                f"check={target!r} has no prompt with a reference answer to compare with"
            )
        return _findings(score, pairs)


def _findings(score: Score, pairs: Sequence[tuple[Example, Case]]) -> list[Finding]:
    examples = list({id(example): example for example, _ in pairs}.values())
    # Both bounds are scored once per example.
    full = score([(example, example.answer) for example in examples])
    none = score([(example, "") for example in examples])
    bounds = {id(example): each for example, *each in zip(examples, full, none, strict=True)}
    scores = score([(example, case.completion) for example, case in pairs])
    return [
        Finding(case, value, *bounds[id(example)])
        for (example, case), value in zip(pairs, scores, strict=True)
    ]


@contextmanager
def _open_scorer(
    target: str, seed: int, answers: str, seconds: float
) -> Iterator[tuple[Score, Task | None]]:
    """Opens the scoring function, and the task that it belongs to, if any."""
    if is_code_reference(target) and (code := parse_reference(target)).is_reward():
        with closing(CustomReward(code, makes=False, seconds=seconds)) as reward:
            yield lambda pairs: [_score_of_reply(answer) for answer in reward.ask(pairs)], None
        return
    with closing(load_task(_spec(target), seed, answers=answers)) as task:
        if has_environments(task):
            raise ValueError(
                f"check={target!r} is scored by its environment, turn by turn: check the function "
                "that its environment scores final answers with"
            )
        yield lambda pairs: _verify(task, pairs), task


def _verify(task: Task, pairs: Sequence[tuple[Example, str]]) -> list[float]:
    examples, completions = zip(*pairs, strict=True)
    return [verdict.score for verdict in task.verify(examples, completions)]


def _spec(target: str) -> str:
    """Specification of a target as for `load_task`; a file path alone is a file of prompts."""
    kind = Path(target).suffix.removeprefix(".")
    is_file = kind in ("jsonl", "parquet") and target.partition(":")[0] not in KINDS
    return f"{kind}:{target}" if is_file else target


def _example(case: Case) -> Example:
    record = {"answer": case.reference}
    return Example(f"What is it? (The answer is {case.reference}.)", case.reference, record=record)


def _score_of_reply(answer: Message) -> float:
    if "parts" in answer:
        return answer["parts"].get("correct", sum(answer["parts"].values()))
    return answer.get("value", float("nan"))


def format_report(target: str, findings: Sequence[Finding]) -> str:
    """Report of the findings: a table of kinds, then answers that were judged wrongly, up to
    `MAX_LISTED` of each group."""
    gamed = [each for each in findings if each.gamed]
    partly = [each for each in findings if each.partly]
    missed = [each for each in findings if each.missed]
    lines = [
        f"{target}: {len(findings)} answers, {len(gamed)} wrong ones get the full score, "
        f"{len(partly)} wrong ones a partial score, {len(missed)} right ones less than the full "
        "score."
    ]
    if gamed or partly or missed:
        lines += ["", *_kind_table(findings)]
    for title, group in (
        ("Wrong, with the score of the reference answer", gamed),
        ("Wrong, with a partial score", partly),
        ("Right, with less than the score of the reference answer", missed),
    ):
        if group:
            lines += ["", f"{title}:", *map(_format_finding, _select_listed(group))]
        if len(group) > MAX_LISTED:
            lines.append(f"  and {len(group) - MAX_LISTED} more")
    return "\n".join(lines)


def _kind_table(findings: Sequence[Finding]) -> list[str]:
    """A line for each kind with answers that were judged wrongly."""
    kinds = dict.fromkeys(
        each.case.kind for each in findings if each.gamed or each.partly or each.missed
    )
    width = max(map(len, kinds))
    lines = [f"{'':{width}}  answers   gamed  partly  missed"]
    for kind in kinds:
        matching = [each for each in findings if each.case.kind == kind]
        flags = [(True, each.gamed, each.partly, each.missed) for each in matching]
        counts = [sum(column) for column in zip(*flags, strict=True)]
        lines.append(f"{kind:{width}}  " + " ".join(f"{count:7d}" for count in counts))
    return lines


def _select_listed(group: Sequence[Finding]) -> list[Finding]:
    """`MAX_LISTED` of them, the first of each kind before the second of any."""
    counts = Counter[str]()
    ranks = []
    for finding in group:
        ranks.append(counts[finding.case.kind])
        counts[finding.case.kind] += 1
    listed = sorted(range(len(group)), key=lambda index: ranks[index])[:MAX_LISTED]
    return [group[index] for index in sorted(listed)]


def _format_finding(finding: Finding) -> str:
    case = finding.case
    why = f"  # {case.because}" if case.because else ""
    return f"  {_shorten(case.reference)} <- {_shorten(case.completion)}: {finding.score:g}{why}"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
