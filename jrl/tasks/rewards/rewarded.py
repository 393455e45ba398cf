"""Task whose score of a completion is a weighted sum of rewards."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jrl.report.warnings import FewWarnings
from jrl.tasks.prompts import PromptSourceTask
from jrl.tasks.rewards.completion import special_of
from jrl.tasks.rewards.custom import CustomReward
from jrl.tasks.rewards.settings import TASK_REWARD
from jrl.tasks.task import FAILURES, REASONS, Example, Prompts, Task, Verdict, check_pairs
from jrl.tasks.workers.process import Message

SUSPICION = "suspicion"


@dataclass(frozen=True)
class Named:
    """A reward under the name that its value has where it gives a single number."""

    name: str
    reward: CustomReward


@dataclass(frozen=True)
class Weighing:
    """Weights by which the parts of rewards become a score.

    Attributes:
      weights: by name; the weight of others is 1.
      full_marks: the sum from which on a completion is correct; None is the sum where all parts of
        positive weight are 1.
      failed: the score where a reward failed.
    """

    weights: Mapping[str, float]
    full_marks: float | None = None
    failed: float = 0.0


class Rewarded(PromptSourceTask):
    """Prompts, and rewards that are asked about every completion of them.

    The score is ``sum(weight * part)`` over the parts that are there. A completion is correct where
    the task's own verifier says so, if it is among the rewards; else where a part is named
    "correct", if that is 1 or more; else from `Weighing.full_marks` on. Where one of the rewards
    fails, the verdict is that failure.
    """

    def __init__(
        self,
        prompts: Prompts,
        rewards: Sequence[Named],
        weighing: Weighing,
        verifier: Task | None = None,
    ):
        """Asks each reward once, about the first training prompt, which shows what its parts are.

        Args:
          prompts: of the task.
          rewards: all that are asked.
          verifier: the prompts' own task, where its verdict is a part as well.

        Raises:
          ValueError: where a reward fails on a reference answer, parts of two rewards have one
            name, or a weight has the name of none.
        """
        super().__init__(prompts)
        self._rewards = list(rewards)
        self._weighing, self._verifier = weighing, verifier
        self._warnings = FewWarnings()
        names = [TASK_REWARD] if verifier is not None else []
        for each in self._rewards:
            names += self._probe(each)
        if SUSPICION in names:
            raise ValueError(
                f"a reward has a component named {SUSPICION}, which is the name of another metric "
                "(reward/suspicion): give it another name."
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"two rewards have a component named {', '.join(twice)}: names of components must "
                "be unique."
            )
        unknown = sorted(set(weighing.weights) - set(names))
        if unknown:
            raise ValueError(
                f"reward_weights names {', '.join(unknown)}, which is not a component of the "
                f"rewards: they have {', '.join(names)}."
            )
        self.part_names: tuple[str, ...] = tuple(names)
        """Of all parts that a verdict can have, in their order."""
        self._weights = {name: weighing.weights.get(name, 1.0) for name in names}
        self._full_marks = weighing.full_marks
        if self._full_marks is None:
            self._full_marks = sum(max(weight, 0.0) for weight in self._weights.values())

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example; equal pairs are asked about once."""
        check_pairs(examples, completions)
        pairs = list(zip(examples, completions, strict=True))
        # Examples that are drawn may share their prompt and differ in what else is known of them,
        # and texts that are alike in their special tokens.
        keys = [(id(example), text, special_of(text)) for example, text in pairs]
        pair_of_key = dict(zip(keys, pairs, strict=True))
        verifier_verdicts: list[Verdict | None] = [None] * len(pair_of_key)
        if self._verifier is not None:
            distinct_examples, texts = (
                zip(*pair_of_key.values(), strict=True) if pair_of_key else ((), ())
            )
            verifier_verdicts = list(self._verifier.verify(distinct_examples, texts))
        answers = [each.reward.ask(list(pair_of_key.values())) for each in self._rewards]
        rows = list(zip(*answers, strict=True)) if answers else [()] * len(pair_of_key)
        scored = [self._verdict(*row) for row in zip(verifier_verdicts, rows, strict=True)]
        verdicts = dict(zip(pair_of_key, scored, strict=True))
        return [verdicts[key] for key in keys]

    def close(self) -> None:
        """Ends the worker processes; more than once does no harm."""
        for each in self._rewards:
            each.reward.close()
        if isinstance(self._prompts, Task):
            self._prompts.close()

    def _verdict(self, verifier_verdict: Verdict | None, answers: Sequence[Message]) -> Verdict:
        if verifier_verdict is not None and verifier_verdict.reason in FAILURES:
            return Verdict(self._weighing.failed, verifier_verdict.reason, ())
        components: dict[str, float] = (
            {} if verifier_verdict is None else {TASK_REWARD: verifier_verdict.score}
        )
        reasons = [] if verifier_verdict is None else [verifier_verdict.reason]
        for each, answer in zip(self._rewards, answers, strict=True):
            answer = self._check_reply(each, answer)
            if "failure" in answer:
                self._warn(each, answer)
                return Verdict(self._weighing.failed, answer["failure"], ())
            components |= _components_of(each, answer)
            if each.name == TASK_REWARD and "reason" in answer:
                reasons.append(answer["reason"])
        # In the order of the weights, as full marks are summed.
        components = {name: components[name] for name in self._weights if name in components}
        score = sum(self._weights[name] * value for name, value in components.items())
        if not math.isfinite(score):
            return Verdict(self._weighing.failed, "not_finite", ())
        return Verdict(score, self._reason(score, components, reasons), tuple(components.items()))

    def _reason(self, score: float, components: Mapping[str, float], reasons: Sequence[str]) -> str:
        if reasons:
            return reasons[0]
        assert self._full_marks is not None
        if "correct" in self._weights:
            correct = components.get("correct", 0.0) >= 1
        else:
            correct = score >= self._full_marks
        if correct:
            return "correct"
        return "partial" if score > 0 else "wrong"

    def _check_reply(self, each: Named, answer: Message) -> Message:
        """The answer, or that it has a part that nobody knows of."""
        if answer.get("reason", REASONS[0]) not in REASONS:
            message = f"reason={answer['reason']!r} is not one of {', '.join(REASONS)}"
            return {"failure": "invalid", "message": message}
        unknown = [name for name in answer.get("parts", ()) if name not in self._weights]
        if "value" in answer and each.name not in self._weights:
            unknown = ["a single number"]
        if not unknown:
            return answer
        names = ", ".join(self._weights)
        message = (
            f"its components are {names}, and it returned {', '.join(unknown)}: return all "
            "components for the first prompt's reference answer, or list them in the task's "
            "weights"
        )
        return {"failure": "invalid", "message": message}

    def _probe(self, each: Named) -> list[str]:
        """The names of the parts of a reward, by asking it."""
        # There always is one, where there may be nothing to train on.
        example = self._prompts.heldout(0)
        (answer,) = each.reward.ask([(example, example.answer)])
        if "failure" not in answer:
            return list(_components_of(each, answer))
        if example.answer:
            raise ValueError(
                f"{each.reward.text} fails on the reference answer of the first prompt: "
                f"{answer['message']}"
            )
        self._warn(each, answer)
        return list(self._weighing.weights) or [each.name]

    def _warn(self, each: Named, answer: Message) -> None:
        message = f"{answer['failure']}: {answer['message']}"
        self._warnings.warn(
            message,
            f"{each.reward.text} failed ({message}); the completion scores "
            f"{self._weighing.failed:g} and counts under verifier/{answer['failure']}",
        )


def _components_of(each: Named, answer: Message) -> dict[str, float]:
    return answer["parts"] if "parts" in answer else {each.name: answer["value"]}
