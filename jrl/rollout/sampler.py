"""Sampler of verified completions: prompts of a task, decoding, and the task's verifier."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jrl.processes.agreement import broadcast_from_main, is_main_process, is_multiprocess
from jrl.processes.progress import REWARD, phase
from jrl.rollout.conversation import Conversation
from jrl.rollout.decoding.protocol import RolloutEngine
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.rollout.sampling import Sampling
from jrl.tasks import Example, Task, Verdict
from jrl.tasks.mixture import environments_of
from jrl.tasks.task import CompletionText
from jrl.text.prompt_format import (
    PromptFormat,
    encode_prompt,
    opened_reasoning,
    special_text_of,
    text_of,
    text_of_row,
)


@dataclass(frozen=True)
class Completion:
    """Trajectory with its text and its verdict.

    Attributes:
      trajectory: the sampled tokens.
      example: the prompt and its answer.
      text: text of the response, without the end-of-sequence token.
      verdict: verdict of the task's verifier; None if the response continues in another step.
    """

    trajectory: Trajectory
    example: Example
    text: str
    verdict: Verdict | None

    @property
    def score(self) -> float:
        """Score of the verdict; 0 before the verdict."""
        # Unfinished responses get no reward from it (`collect.add_verdicts`).
        return 0.0 if self.verdict is None else self.verdict.score

    @property
    def correct(self) -> bool:
        """True if the verdict is full marks; false before the verdict."""
        return self.verdict is not None and self.verdict.correct

    @property
    def length(self) -> int:
        """Tokens of the response so far."""
        return self.trajectory.length

    @property
    def truncated(self) -> bool:
        """True if the length limit ended the response."""
        return self.trajectory.finish == "length"

    def record(self, format: PromptFormat) -> dict[str, Any]:
        """Record for samples.jsonl; if a chat template made the prompt, with the whole conversation
        including special tokens."""
        record: dict[str, Any] = {
            "prompt": self.example.prompt,
            "answer": self.example.answer,
            "completion": self.text,
            "score": self.score,
            # Not a verifier's reason: an unfinished window is no wrong answer.
            "reason": "unfinished" if self.verdict is None else self.verdict.reason,
            "length": self.length,
            "truncated": self.truncated,
        }
        if self.verdict is not None and self.verdict.parts:
            record["rewards"] = dict(self.verdict.parts)
        if self.example.task:
            record["task"] = self.example.task
        if (dialogue := self.trajectory.request.conversation) is not None:
            record["messages"] = dialogue.records
            record["turn_rewards"] = [reward for _, reward in dialogue.rewards]
        # Decoded from the tokens, as the text has no special ones: to debug a template, they must
        # be visible.
        if format.template is not None:
            ids = [*map(int, self.trajectory.request.tokens), *map(int, self.trajectory.response)]
            record["conversation"] = text_of_row(format.tokenizer, ids)
        return record


def scores_of(completions: Sequence[Completion]) -> np.ndarray:
    """Scores of the verifier, ``[completions]``."""
    # float32, as rewards on the mesh: reports and losses use the same numbers.
    return np.array([completion.score for completion in completions], np.float32)


def correct_of(completions: Sequence[Completion]) -> np.ndarray:
    """Mask of the completions with full marks, ``[completions]`` bool."""
    return np.array([completion.correct for completion in completions], bool)


def lengths_of(completions: Sequence[Completion]) -> np.ndarray:
    """Tokens of each response, ``[completions]``."""
    return np.array([completion.length for completion in completions], np.int32)


def sampled_lengths_of(completions: Sequence[Completion]) -> np.ndarray:
    """Tokens of each response that the policy sampled, ``[completions]``."""
    conversations = [completion.trajectory.request.conversation for completion in completions]
    # The response contains the environment's tokens too, whose number is not the policy's.
    answers = [0 if each is None else each.num_answer_tokens for each in conversations]
    return lengths_of(completions) - np.array(answers, np.int32)


def accuracy(completions: Sequence[Completion]) -> float:
    """Fraction of completions with full marks."""
    return float(np.mean(correct_of(completions)))


@contextmanager
def timed(phase: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the time of the body to `seconds[phase]`; the body must block on its own dispatches."""
    begin = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin


class Unverified:
    """Completions that are being verified in the background, while others are decoded.

    Args:
      task: provides the verifier.
      seconds: dictionary to which the time spent waiting for verdicts is added.
    """

    def __init__(self, task: Task, seconds: dict[str, float]):
        self._task, self._seconds = task, seconds
        self._pending: list[tuple[list[Completion], Future[list[Verdict]] | None]] = []

    def add(self, completions: list[Completion]) -> None:
        """Adds completions and starts the verification of finished ones."""
        verdicts = None
        # In the first process only: an answer that timed out there did so for all.
        if is_main_process():
            # `wait` applies the same filter: verdicts come for these only, in this order.
            to_verify = [each for each in completions if _to_verify(each)]
            examples = [each.example for each in to_verify]
            texts = [each.text for each in to_verify]
            verdicts = _in_background(lambda: self._task.verify(examples, texts))
        # In the order of decoding, which all processes share; verdicts may come in any order.
        self._pending.append((completions, verdicts))

    def wait(self, num_running: int = 0) -> list[Completion]:
        """Waits for the verdicts of all additions but the last `num_running`, and returns their
        completions; a collective operation in a run of multiple processes."""
        # By number, never by which verdicts are there: what is sampled next, and with it the
        # rounding of log-probabilities, must not depend on the speed of a verifier.
        num_additions = len(self._pending) - num_running
        additions, self._pending = self._pending[:num_additions], self._pending[num_additions:]
        # None in the other processes, which wait in the broadcast. An exception of a verifier is
        # raised here, in the thread of the caller.
        futures = [future for _, future in additions if future is not None]
        with timed("timing_s/reward", self._seconds), phase(REWARD):
            verdicts = [verdict for future in futures for verdict in future.result()]
            # No broadcast of nothing: the additions are the same in all processes, so none waits
            # forever.
            broadcast = iter(_broadcast_verdicts(verdicts) if additions else [])
        return [
            # The same predicate as in `add`: otherwise verdicts would go to other rows.
            replace(each, verdict=next(broadcast)) if _to_verify(each) else each
            for completions, _ in additions
            for each in completions
        ]


def _to_verify(completion: Completion) -> bool:
    """True if the task's verifier scores the completion. It does not score unfinished responses,
    nor conversations, which environments score."""
    trajectory = completion.trajectory
    return trajectory.finish != "window" and trajectory.request.conversation is None


# Compared by identity: the arrays of an engine cannot be compared.
@dataclass(eq=False)
class Sampler:
    """Rollout engine with a task's prompts and verifier.

    Attributes:
      engine: samples the responses.
      task: provides examples and verdicts.
      format: converts prompts to tokens.
      prompt_length: maximum tokens of a prompt.
      response_length: maximum tokens of a response.
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
        """Decodes the requests with the engine's current weights, while finished ones are verified
        in the background; returns before the last verdict.

        Args:
          examples: by prompt id.
          seconds: dictionary to which the time taken is added, if given.
          report: called with the number of decoded completions.
        """
        seconds, done = {} if seconds is None else seconds, 0
        unverified = Unverified(self.task, seconds)
        with timed("timing_s/gen", seconds):
            self.engine.submit(requests, sampling)
            # draining=True: the rows that are computed together must not depend on when others are
            # requested, or the rounding would depend on that too.
            while trajectories := self.engine.poll(draining=True):
                self.judge(unverified, trajectories, examples)
                done += len(trajectories)
                report(done)
        return unverified

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

            completions = sampler.sample(numbered(examples), Sampling(temperature=0.7), 8)
            print(accuracy(completions))

        Args:
          examples: by prompt id, which with the sample id determines the RNG keys.

        Returns:
          The completions, grouped by prompt, prompts in the order given.
        """
        # In one submission: the slots stay full until the last prompts, and none of them waits for
        # a group before it.
        requests = self.requests(examples, num_samples)
        unverified = self.decode(requests, examples, sampling, seconds=seconds, report=report)
        return sort_completions(unverified.wait(), examples)

    def judge(
        self,
        unverified: Unverified,
        trajectories: list[Trajectory],
        examples: Mapping[int, Example],
    ) -> None:
        """Starts the verification of finished trajectories."""
        # Decoded once: verifier, samples.jsonl and the page must show the same text.
        decoded = dict[tuple[str, bytes], CompletionText]()
        completions = []
        for trajectory in trajectories:
            request, text = trajectory.request, self._text(trajectory, decoded)
            # Environments have scored conversations; other responses have no verdict yet.
            verdict = None if request.conversation is None else request.conversation.verdict
            completions.append(Completion(trajectory, examples[request.prompt], text, verdict))
        unverified.add(completions)

    def requests(self, examples: Mapping[int, Example], num_samples: int) -> list[Request]:
        """Requests to the engine, `num_samples` consecutive ones per prompt."""
        requests = []
        for prompt, example in examples.items():
            ids, environments = self.encoded(example), environments_of(self.task, example)
            dialogue = None if environments is None else Conversation(example)
            # Neighbours in the queue: prefill runs a prompt once for those admitted together.
            requests += [
                Request(prompt, sample, ids, self.response_length, conversation=dialogue)
                for sample in range(num_samples)
            ]
        return requests

    def encoded(self, example: Example) -> np.ndarray:
        """Token ids of the example's prompt."""
        return np.array(encode_prompt(self.format, example, self.prompt_length), np.int32)

    def _text(
        self, trajectory: Trajectory, decoded: dict[tuple[str, bytes], CompletionText]
    ) -> str:
        """Text of a trajectory, from `decoded` if it has an equal one."""
        dialogue = trajectory.request.conversation
        # With the environment's answers in between: tokens do not show who wrote them.
        if dialogue is not None:
            return dialogue.text
        tokenizer, opened = self.format.tokenizer, ""
        if self.format.template is not None:
            # A template may open the reasoning that the policy continues: the text must show its
            # start.
            opened = opened_reasoning(tokenizer, trajectory.request.tokens.tolist())
        key = opened, np.asarray(trajectory.response, np.int32).tobytes()
        if key not in decoded:
            text = opened + text_of(tokenizer, trajectory.response)
            with_special = opened + special_text_of(tokenizer, trajectory.response)
            decoded[key] = CompletionText(text, with_special)
        return decoded[key]


def sort_completions(
    completions: Sequence[Completion], examples: Mapping[int, Example] | None = None
) -> list[Completion]:
    """Sorts completions by prompt and sample: prompts in the order of `examples`, or without those
    by id."""
    # Rows finish in any order, and a group must be contiguous: baselines and shared prompts are
    # found by index.
    order = {prompt: index for index, prompt in enumerate(examples or ())}

    def rank(completion: Completion) -> tuple[int, int]:
        request = completion.trajectory.request
        return order.get(request.prompt, request.prompt), request.sample

    return sorted(completions, key=rank)


def numbered(examples: Sequence[Example], first: int = 0) -> dict[int, Example]:
    """Training prompts by id, counting from `first`."""
    return dict(enumerate(examples, first))


def numbered_heldout(examples: Sequence[Example]) -> dict[int, Example]:
    """Held-out prompts by negative ids, which no training prompt has."""
    # RNG keys follow from the id: with the ids of training prompts an evaluation would use the same
    # keys as training.
    return {-1 - index: example for index, example in enumerate(examples)}


def _broadcast_verdicts(verdicts: list[Verdict]) -> list[Verdict]:
    """Broadcasts the first process's verdicts to all."""
    if not is_multiprocess():
        return verdicts
    # As JSON values. A second verification in another process could have another result, for
    # example by a time limit.
    sent = broadcast_from_main(
        [[float(verdict.score), verdict.reason, verdict.parts] for verdict in verdicts]
    )
    return [
        Verdict(score, reason, None if rewards is None else tuple((n, v) for n, v in rewards))
        for score, reason, rewards in sent
    ]


def _in_background(verify: Callable[[], list[Verdict]]) -> "Future[list[Verdict]]":
    """Runs `verify` in a daemon thread, which does not keep the process from ending."""
    future: Future[list[Verdict]] = Future()

    def run() -> None:
        try:
            future.set_result(verify())
        # Any exception is passed to the waiting thread, which would otherwise wait forever.
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jrl verification", daemon=True).start()
    return future
