"""Check of a verifier: wrong answers that it rewards, and right ones that it does not."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from jrl.tasks.answers.verdict import FINAL
from jrl.tasks.checking.attacks import attacks_on
from jrl.tasks.checking.table import Case, cases
from jrl.tasks.data.files import KINDS
from jrl.tasks.load import load_task
from jrl.tasks.parts import has_environments
from jrl.tasks.references import looks_like_one, reference
from jrl.tasks.rewards.own import OwnReward
from jrl.tasks.task import Example, Task
from jrl.tasks.workers.process import Message

PROMPTS = 8
"""Prompts of a task that are attacked."""
Score = Callable[[Sequence[tuple[Example, str]]], list[float]]
"""Scores of completions; NaN is a failure."""


@dataclass(frozen=True)
class Finding:
    """A case with its scores.

    Attributes:
      case: the answer, with the verdict that it should have.
      score: of the answer.
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

    @property
    def faulty(self) -> bool:
        """True if the answer was judged otherwise than it should be."""
        return self.gamed or self.partly or self.missed


def check(
    target: str, *, seed: int = 0, answers: str = FINAL, seconds: float = 5.0
) -> list[Finding]:
    """Tries the table and the attacks on a task, or on a reward of a user's own.

    Args:
      target: as of `load_task`, a file of prompts, or ``path/to/file.py:reward``.
      seed: of the prompts that are attacked.
      answers: as of `load_task`.
      seconds: how long a reward of a user's own may take.

    Returns:
      A finding for each case, in the order of table and attacks.

    Raises:
      ValueError: where there is no such task or reward, or it is scored by an environment.
    """
    with _opened(target, seed, answers, seconds) as (score, task):
        pairs: list[tuple[Example, Case]] = []
        if task is None or _compares_any(target):
            pairs += [(_example(case), case) for case in cases()]
        if task is not None:
            drawn = [task.train(index) for index in range(PROMPTS)]
            pairs += attacks_on(list({example.prompt: example for example in drawn}.values()))
        if not pairs:
            raise ValueError(
                f"check={target!r} has no prompt with a gold answer, and nothing to compare with"
            )
        return _findings(score, pairs)


def _findings(score: Score, pairs: Sequence[tuple[Example, Case]]) -> list[Finding]:
    examples = list({id(example): example for example, _ in pairs}.values())
    # What is asked about twice is asked once; a failure is worth nothing.
    golds = score([(example, example.answer) for example in examples])
    nothings = score([(example, "") for example in examples])
    full = {id(example): value for example, value in zip(examples, golds, strict=True)}
    none = {id(example): value for example, value in zip(examples, nothings, strict=True)}
    scores = score([(example, case.completion) for example, case in pairs])
    return [
        Finding(case, value, full[id(example)], none[id(example)])
        for (example, case), value in zip(pairs, scores, strict=True)
    ]


@contextmanager
def _opened(
    target: str, seed: int, answers: str, seconds: float
) -> Iterator[tuple[Score, Task | None]]:
    """Opens the scoring function, and the task that it belongs to, if any."""
    with ExitStack() as stack:
        if looks_like_one(target) and (found := reference(target)).is_reward():
            reward = OwnReward(found, makes=False, seconds=seconds)
            stack.callback(reward.close)
            yield lambda pairs: [_value(answer) for answer in reward.ask(pairs)], None
            return
        task = load_task(_spec(target), seed, answers=answers)
        stack.callback(task.close)
        if has_environments(task):
            raise ValueError(
                f"check={target!r} is scored by its environment, turn by turn: check the function "
                "that its environment scores final answers with"
            )
        yield lambda pairs: _verified(task, pairs), task


def _verified(task: Task, pairs: Sequence[tuple[Example, str]]) -> list[float]:
    examples, completions = zip(*pairs, strict=True)
    return [verdict.score for verdict in task.verify(examples, completions)]


def _spec(target: str) -> str:
    """A file alone is one of prompts."""
    path = Path(target)
    if target.partition(":")[0] in KINDS:
        return target
    if path.suffix == ".jsonl":
        return f"jsonl:{target}"
    return f"parquet:{target}" if path.suffix == ".parquet" else target


def _compares_any(target: str) -> bool:
    """True if answers may be compared with any reference answer, not with those of the task's
    prompts alone."""
    return _spec(target).partition(":")[0] in KINDS


def _example(case: Case) -> Example:
    record = {"answer": case.gold}
    return Example(f"What is it? (The answer is {case.gold}.)", case.gold, record=record)


def _value(answer: Message) -> float:
    if "parts" in answer:
        parts = answer["parts"]
        return parts["correct"] if "correct" in parts else sum(parts.values())
    return answer.get("value", float("nan"))


def page(target: str, findings: Sequence[Finding]) -> str:
    """Report of the findings: a table of kinds, then answers that were judged wrongly, up to
    `LISTED` of each group."""
    gamed = [each for each in findings if each.gamed]
    partly = [each for each in findings if each.partly]
    missed = [each for each in findings if each.missed]
    lines = [
        f"{target}: {len(findings)} answers, {len(gamed)} that are wrong get full marks, "
        f"{len(partly)} a part of them, {len(missed)} that are right do not get them."
    ]
    if gamed or partly or missed:
        lines += ["", *_by_kind(findings)]
    for title, group in (
        ("Wrong, and worth as much as the gold answer", gamed),
        ("Wrong, and worth more than nothing", partly),
        ("Right, and worth less than the gold answer", missed),
    ):
        if group:
            lines += ["", f"{title}:"]
            lines += [_line(each) for each in _some_of_each_kind(group)]
        if len(group) > LISTED:
            lines.append(f"  and {len(group) - LISTED} more")
    return "\n".join(lines)


def _by_kind(findings: Sequence[Finding]) -> list[str]:
    """A line for each kind with answers that were judged wrongly."""
    kinds = dict.fromkeys(each.case.kind for each in findings if each.faulty)
    width = max(map(len, kinds))
    lines = [f"{'':{width}}  answers   gamed  partly  missed"]
    for kind in kinds:
        own = [each for each in findings if each.case.kind == kind]
        flags = [(True, each.gamed, each.partly, each.missed) for each in own]
        counts = [sum(column) for column in zip(*flags, strict=True)]
        lines.append(f"{kind:{width}}  " + " ".join(f"{count:7d}" for count in counts))
    return lines


def _some_of_each_kind(group: Sequence[Finding]) -> list[Finding]:
    """`LISTED` of them, the first of each kind before the second of any."""
    counts = Counter[str]()
    ranks = []
    for finding in group:
        ranks.append(counts[finding.case.kind])
        counts[finding.case.kind] += 1
    chosen = sorted(range(len(group)), key=lambda at: ranks[at])[:LISTED]
    return [group[at] for at in sorted(chosen)]


LISTED = 20
"""Answers of a group that are written out."""


def _line(finding: Finding) -> str:
    case = finding.case
    why = f"  # {case.because}" if case.because else ""
    return f"  {_short(case.gold)} <- {_short(case.completion)}: {finding.score:g}{why}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
