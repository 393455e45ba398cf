"""Prompts of a task in, verified completions out."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import broadcast_from_main, is_main_process, is_multiprocess
from jrl.recipes.base.batch import Batch
from jrl.rollout.engine import RolloutEngine
from jrl.rollout.requests import Request, Trajectory
from jrl.rollout.sampling import Sampling
from jrl.tasks import Example, Task, Verdict
from jrl.text.prompt_format import PromptFormat
from jrl.text.prompts import conversation, encode_prompt, text_of


@dataclass(frozen=True)
class Completion:
    """A trajectory as people read it, with its verdict.

    Attributes:
      trajectory: what was sampled.
      example: the prompt and its answer.
      text: of the response, its end left out.
      verdict: of the task's verifier.
    """

    trajectory: Trajectory
    example: Example
    text: str
    verdict: Verdict

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return len(self.trajectory.tokens)

    @property
    def truncated(self) -> bool:
        """Whether the limit of its length ended it."""
        return self.trajectory.finish == "length"

    def at(self, batch: Batch[Array], row: int) -> "Completion":
        """The completion as a row of another batch."""
        return replace(self, trajectory=replace(self.trajectory, batch=batch, row=row))

    def record(self, format: PromptFormat) -> dict[str, Any]:
        """As samples.jsonl holds it; where a chat template made the prompt, with the whole
        conversation as the network read and wrote it."""
        record: dict[str, Any] = {
            "prompt": self.example.prompt,
            "answer": self.example.answer,
            "completion": self.text,
            "score": self.verdict.score,
            "reason": self.verdict.reason,
            "length": self.length,
            "truncated": self.truncated,
        }
        if format.template is not None:
            ids = [*map(int, self.trajectory.request.tokens), *map(int, self.trajectory.tokens)]
            record["conversation"] = conversation(format.tokenizer, ids)
        return record


def scores_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` of the verifier."""
    return np.array([completion.verdict.score for completion in completions], np.float32)


def lengths_of(completions: Sequence[Completion]) -> np.ndarray:
    """``[completions]`` sampled tokens."""
    return np.array([completion.length for completion in completions], np.int32)


def accuracy(completions: Sequence[Completion]) -> float:
    """The share of completions with full marks."""
    return float(np.mean(scores_of(completions) == 1.0))


class Unverified:
    """Completions whose verdicts are being made, in the background.

    The time that decoding took is known; that of verification is what `verified` waits for.
    """

    def __init__(
        self,
        task: Task,
        trajectories: list[Trajectory],
        examples: list[Example],
        texts: list[str],
        seconds: dict[str, float],
    ):
        self._columns, self._seconds = (trajectories, examples, texts), seconds
        # By the first process: an answer that timed out there did so for all.
        self._verdicts = _in_background(task.verify, examples, texts) if is_main_process() else None

    def verified(self) -> list[Completion]:
        """The completions with their verdicts; with several processes a collective."""
        begin = time.perf_counter()
        verdicts = _shared([] if self._verdicts is None else self._verdicts.result())
        waited = time.perf_counter() - begin
        self._seconds["timing_s/reward"] = self._seconds.get("timing_s/reward", 0.0) + waited
        return [Completion(*row) for row in zip(*self._columns, verdicts, strict=True)]


class Sampler:
    """An engine with a task's prompts and verifier on either side.

    Args:
      engine: what samples.
      task: prompts and verifier.
      format: how prompts become tokens.
      prompt_length: tokens that a prompt may have.
      response_length: the limit of a completion in tokens, end-of-sequence included.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        task: Task,
        format: PromptFormat,
        prompt_length: int,
        response_length: int,
    ):
        self.engine, self.task, self.format = engine, task, format
        self.prompt_length, self.response_length = prompt_length, response_length

    def decode(
        self,
        examples: Sequence[Example],
        sampling: Sampling,
        num_samples: int,
        key: Array,
        *,
        first: int = 0,
        seconds: dict[str, float] | None = None,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> Unverified:
        """Completes each prompt `num_samples` times with the weights that the engine has, and
        begins to have the completions verified: the next may be decoded meanwhile.

        Args:
          first: number of the first prompt, those of the others follow.
          seconds: the time taken is added here, if given.
          entropy: statistics by which a temperature that adapts follows the policy; None samples at
            the base temperature.
        """
        seconds = {} if seconds is None else seconds
        begin = time.perf_counter()
        self.engine.submit(self.requests(examples, num_samples, first), sampling, key, entropy)
        trajectories = self.engine.poll()
        seconds["timing_s/gen"] = seconds.get("timing_s/gen", 0.0) + time.perf_counter() - begin
        texts = [text_of(self.format.tokenizer, t.tokens) for t in trajectories]
        answered = [examples[t.request.prompt - first] for t in trajectories]
        return Unverified(self.task, trajectories, answered, texts, seconds)

    def sample(
        self,
        examples: Sequence[Example],
        sampling: Sampling,
        num_samples: int,
        key: Array,
        *,
        first: int = 0,
        seconds: dict[str, float] | None = None,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> list[Completion]:
        """`decode`, and waits for the verdicts."""
        drawn = self.decode(
            examples, sampling, num_samples, key, first=first, seconds=seconds, entropy=entropy
        )
        return drawn.verified()

    def requests(
        self, examples: Sequence[Example], num_samples: int, first: int = 0
    ) -> list[Request]:
        """What an engine is asked for, the samples of a prompt in a row."""
        return [
            Request(first + number, sample, ids, self.response_length)
            for number, ids in enumerate(map(self._encoded, examples))
            for sample in range(num_samples)
        ]

    def _encoded(self, example: Example) -> np.ndarray:
        return np.array(encode_prompt(self.format, example, self.prompt_length), np.int32)


def _shared(given: list[Verdict]) -> list[Verdict]:
    """The first process's verdicts, in all of them."""
    if not is_multiprocess():
        return given
    sent = broadcast_from_main([[float(verdict.score), verdict.reason] for verdict in given])
    return [Verdict(score, reason) for score, reason in sent]


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
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jrl verification", daemon=True).start()
    return future
