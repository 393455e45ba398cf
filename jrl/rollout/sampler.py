"""Prompts of a task in, verified completions out."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from jrl.processes.agreement import broadcast_from_main, is_main_process, is_multiprocess
from jrl.rollout.conversations.turns import Turns
from jrl.rollout.decoding.protocol import RolloutEngine
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.rollout.sampling import Sampling
from jrl.rollout.timing import timed
from jrl.tasks import Example, Task, Verdict
from jrl.tasks.parts import environments_of
from jrl.tasks.rewards.completion import CompletionText
from jrl.text.prompt_format import PromptFormat
from jrl.text.prompts import (
    conversation,
    encode_prompt,
    opened_reasoning,
    special_text_of,
    text_of,
)


@dataclass(frozen=True)
class Completion:
    """A trajectory as people read it, with its verdict.

    Attributes:
      trajectory: what was sampled.
      example: the prompt and its answer.
      text: of the response, its end left out.
      verdict: of the task's verifier; None where the response goes on in another step.
    """

    trajectory: Trajectory
    example: Example
    text: str
    verdict: Verdict | None

    @property
    def score(self) -> float:
        """Of the verdict; 0 without one."""
        # No reward is made of it while the response goes on (`jrl.trainer.prepare.verified`).
        return 0.0 if self.verdict is None else self.verdict.score

    @property
    def correct(self) -> bool:
        """Whether the verdict is full marks; false without one."""
        return self.verdict is not None and self.verdict.correct

    @property
    def length(self) -> int:
        """Tokens of the response so far."""
        return self.trajectory.length

    @property
    def truncated(self) -> bool:
        """Whether the limit of its length ended it."""
        return self.trajectory.finish == "length"

    def record(self, format: PromptFormat) -> dict[str, Any]:
        """As samples.jsonl holds it; where a chat template made the prompt, with the whole
        conversation as the network read and wrote it."""
        record: dict[str, Any] = {
            "prompt": self.example.prompt,
            "answer": self.example.answer,
            "completion": self.text,
            "score": self.score,
            # No reason of a verifier: a window must not be read as a wrong answer.
            "reason": "unfinished" if self.verdict is None else self.verdict.reason,
            "length": self.length,
            "truncated": self.truncated,
        }
        if self.verdict is not None and self.verdict.parts:
            record["rewards"] = dict(self.verdict.parts)
        if self.example.task:
            record["task"] = self.example.task
        if (turns := self.trajectory.request.turns) is not None:
            record["messages"] = turns.records
            record["turn_rewards"] = [reward for _, reward in turns.rewards]
        # From the tokens, as the text has no special ones: whoever looks for a fault of the
        # template must see what the network read.
        if format.template is not None:
            ids = [*map(int, self.trajectory.request.tokens), *map(int, self.trajectory.response)]
            record["conversation"] = conversation(format.tokenizer, ids)
        return record


def scores_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` of the verifier."""
    # As rewards are on the mesh: reports and losses see the same numbers.
    return np.array([completion.score for completion in completions], np.float32)


def correct_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` bool: which have full marks."""
    return np.array([completion.correct for completion in completions], bool)


def lengths_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` tokens of responses."""
    return np.array([completion.length for completion in completions], np.int32)


def sampled_lengths_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` those of them that the policy sampled."""
    turns = [completion.trajectory.request.turns for completion in completions]
    # What an environment says stands in the response too, and no policy is answerable for how long
    # that is.
    answers = [0 if each is None else each.num_answer_tokens for each in turns]
    return lengths_of(completions) - np.array(answers, np.int32)


def accuracy(completions: Sequence[Completion]) -> float:
    """The share of completions with full marks."""
    return float(np.mean(correct_of(completions)))


class Unverified:
    """Completions whose verdicts are being made, in the background, while others are decoded.

    Args:
      task: whose verifier judges.
      seconds: where the time is added that is spent in waiting for verdicts.
    """

    def __init__(self, task: Task, seconds: dict[str, float]):
        self._task, self._seconds = task, seconds
        self._pending: list[
            tuple[list[Trajectory], list[Example], list[str], Future[list[Verdict]] | None]
        ] = []

    def add(
        self, trajectories: list[Trajectory], examples: list[Example], texts: list[str]
    ) -> None:
        """More of them; nothing is asked about those that are not finished."""
        # A filter that `_take` repeats: verdicts come for these alone, in this order.
        ended = [place for place, t in enumerate(trajectories) if _to_verify(t)]
        verdicts = None
        # By the first process: an answer that timed out there did so for all.
        if is_main_process():
            asked = [examples[place] for place in ended]
            given = [texts[place] for place in ended]
            verdicts = _in_background(self._task.verify, asked, given)
        # In the order of decoding, which all processes share; verdicts may come in any.
        self._pending.append((trajectories, examples, texts, verdicts))

    def ready(self) -> list[Completion]:
        """Those whose verdicts came since the last call; with several processes a collective."""
        # From the front alone: one that came early waits for those before it, so that the order of
        # completions does not depend on how fast a verifier is.
        done = 0
        while done < len(self._pending):
            verdicts = self._pending[done][3]
            if verdicts is None or not verdicts.done():
                break
            done += 1
        # Only the first process can look at its verdicts. All must take as many, or they would
        # learn from different rows.
        return self._take(int(broadcast_from_main(done)))

    def verified(self) -> list[Completion]:
        """All that `ready` has not given yet; with several processes a collective."""
        with timed("timing_s/reward", self._seconds):
            return self._take(len(self._pending))

    def _take(self, number: int) -> list[Completion]:
        """Waits for the verdicts of the first so many additions."""
        taken, self._pending = self._pending[:number], self._pending[number:]
        # None in the other processes, which wait in the broadcast. What a verifier raised comes up
        # here, in the thread of the caller.
        futures = [future for *_, future in taken if future is not None]
        given = [verdict for future in futures for verdict in future.result()]
        # Of nothing there is no broadcast: `number` is the same in all processes, so none waits
        # alone.
        verdicts = iter(_shared(given) if taken else [])
        return [
            # By the predicate of `add`: by any other, verdicts would be given to other rows.
            Completion(*row, next(verdicts) if _to_verify(row[0]) else _given(row[0]))
            for trajectories, examples, texts, _ in taken
            for row in zip(trajectories, examples, texts, strict=True)
        ]


def _to_verify(trajectory: Trajectory) -> bool:
    """Whether the task's verifier has a say: it has none of responses that go on, nor of
    conversations, which environments score."""
    return trajectory.finish != "window" and trajectory.request.turns is None


def _given(trajectory: Trajectory) -> Verdict | None:
    """The verdict of a conversation; None of a response that goes on."""
    turns = trajectory.request.turns
    return None if turns is None else turns.verdict


# By identity: two of them are never one engine, and what an engine holds cannot be compared.
@dataclass(eq=False)
class Sampler:
    """An engine with a task's prompts and verifier on either side.

    Attributes:
      engine: what samples.
      task: where examples and verdicts come from.
      format: how prompts become tokens.
      prompt_length: tokens of a prompt at most.
      response_length: tokens of a response at most.
    """

    engine: RolloutEngine
    task: Task
    format: PromptFormat
    prompt_length: int
    response_length: int

    def decode(
        self,
        requests: Sequence[Request],
        examples: Mapping[int, Example],
        sampling: Sampling,
        *,
        seconds: dict[str, float] | None = None,
        report: Callable[[int], None] = lambda done: None,
    ) -> Unverified:
        """Serves the requests with the weights that the engine has, and has what is finished
        verified meanwhile: others may be decoded before the last verdict.

        Args:
          examples: by the numbers of prompts.
          seconds: the time taken is added here, if given.
          report: called with the number of completions that are decoded.
        """
        seconds, done = {} if seconds is None else seconds, 0
        drawn = Unverified(self.task, seconds)
        with timed("timing_s/gen", seconds):
            self.engine.submit(requests, sampling)
            # Alone: which rows are computed together must not depend on when others are asked for,
            # or the last bits would be of that too.
            while trajectories := self.engine.poll(alone=True):
                self.judge(drawn, trajectories, examples)
                done += len(trajectories)
                report(done)
        return drawn

    def sample(
        self,
        examples: Mapping[int, Example],
        sampling: Sampling,
        num_samples: int,
        *,
        seconds: dict[str, float] | None = None,
        report: Callable[[int], None] = lambda done: None,
    ) -> list[Completion]:
        """Completes each prompt `num_samples` times and waits for the verdicts.

        Args:
          examples: by the number of the prompt, which with that of the sample decides what is
            drawn.

        Returns:
          The samples of a prompt together, prompts in the order given.
        """
        # All at once: the slots stay full until the last prompts, and none of them waits for a
        # group before it.
        requests = self.requests(examples, num_samples)
        drawn = self.decode(requests, examples, sampling, seconds=seconds, report=report)
        return in_order(drawn.verified(), examples)

    def judge(
        self, drawn: Unverified, trajectories: list[Trajectory], examples: Mapping[int, Example]
    ) -> None:
        """Begins to have trajectories verified, those that are finished."""
        # Once, here: verifier, samples.jsonl and the page must speak of the same text.
        known = dict[tuple[str, bytes], CompletionText]()
        texts = [self._text(t, known) for t in trajectories]
        drawn.add(trajectories, [examples[t.request.prompt] for t in trajectories], texts)

    def requests(self, examples: Mapping[int, Example], num_samples: int) -> list[Request]:
        """What an engine is asked for, the samples of a prompt in a row."""
        requests = []
        for number, example in examples.items():
            ids, turns = self.encoded(example), None
            if environments_of(self.task, example) is not None:
                turns = Turns(example)
            # Neighbours in the queue: a prompt runs once for those that are seated together.
            requests += [
                Request(number, sample, ids, self.response_length, turns=turns)
                for sample in range(num_samples)
            ]
        return requests

    def encoded(self, example: Example) -> np.ndarray:
        """The ids of its prompt."""
        return np.array(encode_prompt(self.format, example, self.prompt_length), np.int32)

    def _text(self, trajectory: Trajectory, known: dict[tuple[str, bytes], CompletionText]) -> str:
        """What a trajectory says.

        Args:
          known: the texts of others, by their ids: samples of a prompt are often alike.
        """
        turns = trajectory.request.turns
        # With what the environment said between: of tokens alone nobody could tell whose they are.
        if turns is not None:
            return turns.text
        tokenizer, opened = self.format.tokenizer, ""
        if self.format.template is not None:
            # A template may open the reasoning that the policy goes on with: whoever reads the text
            # must see where it began.
            opened = opened_reasoning(tokenizer, trajectory.request.tokens.tolist())
        given = tokenizer, trajectory.response
        key = opened, np.asarray(trajectory.response, np.int32).tobytes()
        if key not in known:
            text = opened + text_of(*given)
            known[key] = CompletionText(text, opened + special_text_of(*given))
        return known[key]


def in_order(
    completions: Sequence[Completion], examples: Mapping[int, Example] | None = None
) -> list[Completion]:
    """The samples of a prompt together, in their order, and prompts in the order of `examples`, or
    without those of their numbers."""
    # Rows end in any order, and a group must stand together: baselines and shared prompts are cut
    # out by place.
    place = {number: index for index, number in enumerate(examples or ())}

    def rank(completion: Completion) -> tuple[int, int]:
        request = completion.trajectory.request
        return place.get(request.prompt, request.prompt), request.sample

    return sorted(completions, key=rank)


def numbered(examples: Sequence[Example], first: int = 0) -> dict[int, Example]:
    """Training prompts by their numbers."""
    return dict(enumerate(examples, first))


def numbered_heldout(examples: Sequence[Example]) -> dict[int, Example]:
    """Held-out prompts by numbers that no training prompt has: below zero."""
    # What is drawn follows from the number: with those of training prompts an evaluation would draw
    # what training will.
    return {-1 - index: example for index, example in enumerate(examples)}


def _shared(given: list[Verdict]) -> list[Verdict]:
    """The first process's verdicts, in all of them."""
    if not is_multiprocess():
        return given
    # As JSON has them. A second verification in another process could end otherwise, by a time
    # limit for one.
    sent = broadcast_from_main(
        [[float(verdict.score), verdict.reason, verdict.parts] for verdict in given]
    )
    return [
        Verdict(score, reason, None if parts is None else tuple((n, v) for n, v in parts))
        for score, reason, parts in sent
    ]


def _in_background(
    verify: Callable[[Sequence[Example], Sequence[str]], list[Verdict]],
    examples: Sequence[Example],
    texts: Sequence[str],
) -> "Future[list[Verdict]]":
    """`verify` in a thread that does not keep the process from ending."""
    future: Future[list[Verdict]] = Future()

    def run() -> None:
        try:
            future.set_result(verify(examples, texts))
        # Whatever it is belongs to who waits: a thread that dies in silence leaves them waiting for
        # ever.
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jrl verification", daemon=True).start()
    return future
