"""Rewards of completions: custom functions, called in workers, and their weighted sum."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jrl.report.warnings import FewWarnings
from jrl.tasks.data.records import as_json
from jrl.tasks.references import CodeReference
from jrl.tasks.task import (
    FAILURES,
    REASONS,
    Example,
    Prompts,
    PromptSourceTask,
    Task,
    Verdict,
    pair_completions,
    special_of,
)
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Message, parse_failure
from jrl.tasks.workers.user_code import SPECIAL

TASK_REWARD = "task"
"""Name of the task's own verifier or reward, in a list of rewards and among the components."""
SUSPICION = "suspicion"


@dataclass(frozen=True)
class RewardSettings:
    """Settings of the rewards of completions.

    Attributes:
      rewards: references to functions, and `TASK_REWARD`; empty is the task's own reward only.
      weights: ``NAME=NUMBER`` each; 1 by default.
      seconds: time limit of one call.
      failed: the score of a completion whose reward failed.
    """

    rewards: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    seconds: float = 5.0
    failed: float = 0.0

    def __post_init__(self):
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"reward_seconds={self.seconds} must be above 0.")
        if not math.isfinite(self.failed):
            raise ValueError(f"failed_reward={self.failed} must be a finite number.")
        twice = {name for name in self.rewards if self.rewards.count(name) > 1}
        if twice:
            raise ValueError(f"reward={', '.join(sorted(twice))} is given twice: once is enough.")
        parse_weights(self.weights)


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Parses weights by name from texts ``NAME=NUMBER``.

    Raises:
      ValueError: for any other form, and for a name that occurs twice.
    """
    weights: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not equals or not math.isfinite(weight):
            raise ValueError(
                f"reward_weights={text!r} is not a weight: write NAME=NUMBER, as in format=0.2."
            )
        if name in weights:
            raise ValueError(f"reward_weights has {name!r} twice: give each name one weight.")
        weights[name] = weight
    return weights


class CustomReward:
    """A function ``reward(prompt, completion, **record)``, or the reward of a task. Close it when
    it is no longer needed.

    Attributes:
      text: the reference.
      name: name of its component if it returns a single number.
    """

    def __init__(
        self, reference: CodeReference, *, makes: bool, seconds: float, workers: int | None = None
    ):
        """Describes the workers; the first call starts one.

        Args:
          makes: whether the reference makes a task, whose reward is used.
          seconds: time limit of one answer.
          workers: number of processes; None is one per processor core, up to 8.
        """
        self.text, self.name = reference.text, TASK_REWARD if makes else reference.name
        self._folder = tempfile.TemporaryDirectory(prefix="jrl-reward-")
        make = reference.worker_maker("reward", self._folder.name, makes=makes, seconds=seconds)
        self._pool = Pool(make, workers, batched=True)

    def ask(self, pairs: Sequence[tuple[Example, str]]) -> list[Message]:
        """Calls the reward for each completion: ``{"value": ...}`` or ``{"parts": ...}``, or
        ``{"failure": ..., "message": ...}`` with one of `FAILURES`."""
        questions = [_question(*pair) for pair in pairs]
        return [parse_failure(answer) for answer in self._pool.ask_all(questions)]

    def close(self) -> None:
        """Ends the worker processes; it may be called repeatedly."""
        self._pool.close()
        self._folder.cleanup()


def _question(example: Example, completion: str) -> Message:
    reserved = ("prompt", "completion", SPECIAL)
    fields = {name: value for name, value in example.record.items() if name not in reserved}
    if example.answer:
        fields.setdefault("answer", example.answer)
    # The worker receives the fields as JSON, whatever types a file's reader gave them.
    question = {"prompt": example.prompt, "completion": completion, "fields": as_json(fields)}
    if (special := special_of(completion)) != completion:
        question["special"] = special
    return question


class Rewarded(PromptSourceTask):
    """Prompts, and rewards that score every completion of them.

    The score is ``sum(weight * component)`` over the components that are present. A completion is
    correct if the task's own verifier says so, if that is among the rewards; else, if there is a
    component "correct", if that is at least 1; else if the score is at least `full_marks`. If a
    reward fails, the verdict is that failure.
    """

    def __init__(
        self,
        prompts: Prompts,
        rewards: Sequence[CustomReward],
        verifier: Task | None,
        *,
        weights: Mapping[str, float],
        full_marks: float | None,
        failed: float,
    ):
        """Calls each reward once, for the first held-out prompt, to obtain its components.

        Args:
          prompts: prompts of the task.
          rewards: the custom rewards.
          verifier: the prompts' own task, if its verdict is a component as well.
          weights: weights of the components by name; 1 by default.
          full_marks: minimum score of a correct completion; None is the score with 1 for all
            components of positive weight.
          failed: the score if a reward failed.

        Raises:
          ValueError: if a reward fails on a reference answer, components of two rewards have the
            same name, or a weight has an unknown name.
        """
        super().__init__(prompts)
        self._rewards = list(rewards)
        self._verifier, self._failed = verifier, failed
        self._warnings = FewWarnings()
        names = [TASK_REWARD] if verifier is not None else []
        names += [name for each in self._rewards for name in self._probe(each, weights)]
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
        unknown = sorted(set(weights) - set(names))
        if unknown:
            raise ValueError(
                f"reward_weights names {', '.join(unknown)}, which is not a component of the "
                f"rewards: they have {', '.join(names)}."
            )
        self.part_names: tuple[str, ...] = tuple(names)
        """Names of all components that a verdict can have, in order."""
        self._weights = {name: weights.get(name, 1.0) for name in names}
        highest = sum(max(weight, 0.0) for weight in self._weights.values())
        # Of prompts that nothing rewards, no completion is known to be correct.
        highest = highest if names else math.inf
        self._full_marks = highest if full_marks is None else full_marks

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example; equal pairs are scored once."""
        pairs = pair_completions(examples, completions)
        # Generated examples may share a prompt and differ in other fields; equal texts may differ
        # in their special tokens.
        keys = [(id(example), text, special_of(text)) for example, text in pairs]
        distinct = dict(zip(keys, pairs, strict=True))
        verified: list[Verdict | None] = [None] * len(distinct)
        if self._verifier is not None:
            distinct_examples = [example for example, _ in distinct.values()]
            texts = [text for _, text in distinct.values()]
            verified = list(self._verifier.verify(distinct_examples, texts))
        answers = [each.ask(list(distinct.values())) for each in self._rewards]
        verdicts = {
            key: self._verdict(*row) for key, *row in zip(distinct, verified, *answers, strict=True)
        }
        return [verdicts[key] for key in keys]

    def close(self) -> None:
        """Ends the worker processes; it may be called repeatedly."""
        for each in self._rewards:
            each.close()
        if isinstance(self._prompts, Task):
            self._prompts.close()

    def _verdict(self, verified: Verdict | None, *answers: Message) -> Verdict:
        components: dict[str, float] = {}
        reason: str | None = None
        if verified is not None:
            if verified.reason in FAILURES:
                return Verdict(self._failed, verified.reason, ())
            components[TASK_REWARD], reason = verified.score, verified.reason
        for each, answer in zip(self._rewards, answers, strict=True):
            answer = self._check_reply(each, answer)
            if "failure" in answer:
                self._warn(each, answer)
                return Verdict(self._failed, answer["failure"], ())
            components |= _components_of(each, answer)
            if each.name == TASK_REWARD:
                reason = reason or answer.get("reason")
        # In the order of the weights, like the sum for full marks, for equal rounding.
        components = {name: components[name] for name in self._weights if name in components}
        score = sum(self._weights[name] * value for name, value in components.items())
        if not math.isfinite(score):
            return Verdict(self._failed, "not_finite", ())
        reason = reason or self._reason(score, components)
        return Verdict(score, reason, tuple(components.items()))

    def _reason(self, score: float, components: Mapping[str, float]) -> str:
        correct = score >= self._full_marks
        if "correct" in self._weights:
            correct = components.get("correct", 0.0) >= 1
        if correct:
            return "correct"
        return "partial" if score > 0 else "wrong"

    def _check_reply(self, each: CustomReward, answer: Message) -> Message:
        """The answer, or a failure if it has an unknown reason or component."""
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

    def _probe(self, each: CustomReward, weights: Mapping[str, float]) -> list[str]:
        """Component names of a reward, from a call on the first held-out prompt."""
        # A held-out prompt always exists; there may be no training prompt.
        example = self._prompts.heldout(0)
        (answer,) = each.ask([(example, example.answer)])
        if "failure" not in answer:
            return list(_components_of(each, answer))
        if example.answer:
            raise ValueError(
                f"{each.text} fails on the reference answer of the first prompt: "
                f"{answer['message']}"
            )
        self._warn(each, answer)
        return list(weights) or [each.name]

    def _warn(self, each: CustomReward, answer: Message) -> None:
        message = f"{answer['failure']}: {answer['message']}"
        self._warnings.warn(
            message,
            f"{each.text} failed ({message}); the completion scores "
            f"{self._failed:g} and counts under verifier/{answer['failure']}",
        )


def _components_of(each: CustomReward, answer: Message) -> dict[str, float]:
    return answer["parts"] if "parts" in answer else {each.name: answer["value"]}
