"""Request in progress, and the events that its client receives."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jrl.serving.api_request import ApiRequest
from jrl.serving.errors import ApiError
from jrl.serving.transcript import TokenLogprobs


@dataclass(frozen=True)
class ChoiceDelta:
    """Increment of a choice that is sent to its client.

    Attributes:
      index: of the choice.
      text: text that is final.
      logprobs: tokens that start in the text, if log-probabilities were requested.
      num_tokens: sampled so far.
      finish: "stop" or "length" where it has ended, else None.
      version: of the policy that generates it.
    """

    index: int
    text: str
    logprobs: list[TokenLogprobs]
    num_tokens: int
    finish: str | None
    version: int


Event = ChoiceDelta | ApiError
"""Event of a request: a delta, or the error that ends it."""


@dataclass(eq=False)
class Job:
    """Request between its arrival and its end.

    Attributes:
      request: the parsed request.
      prompts: token ids of each prompt.
      limits: most tokens of a completion, for each prompt.
      on_event: callback for events, called from the engine's thread.
      arrived: time of arrival by `time.perf_counter`.
      prompt_ids: ids of its prompts in the engine, once it is scheduled.
      num_left: choices that have not finished.
    """

    request: ApiRequest
    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    on_event: Callable[[Event], None]
    arrived: float = field(default_factory=time.perf_counter)
    prompt_ids: tuple[int, ...] = ()
    num_left: int = field(init=False)

    def __post_init__(self):
        self.num_left = self.num_choices

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Keys of its choices in the engine: id of the prompt, and index over all prompts.

        It is empty before the request is scheduled.
        """
        n = self.request.n
        return [
            (prompt_id, index)
            for prompt_index, prompt_id in enumerate(self.prompt_ids)
            for index in range(prompt_index * n, (prompt_index + 1) * n)
        ]
