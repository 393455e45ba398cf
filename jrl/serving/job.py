"""A request between its arrival and its end, and what its client learns meanwhile."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jrl.serving.asked import Asked
from jrl.serving.refusal import Refused
from jrl.serving.transcript import Place


@dataclass(frozen=True)
class Piece:
    """What a client learns of a choice at once.

    Attributes:
      index: of the choice.
      text: that can be shown.
      places: tokens that the text begins with, where they were asked for.
      num_tokens: sampled so far.
      finish: "stop" or "length" where it has ended.
      version: of the policy that writes it.
    """

    index: int
    text: str
    places: list[Place]
    num_tokens: int
    finish: str | None
    version: int


Event = Piece | Refused
"""What comes of a request: pieces, or why no more do."""


@dataclass(eq=False)
class Job:
    """A request between its arrival and its end.

    Attributes:
      asked: what is wanted.
      prompts: ids of each prompt.
      limits: tokens of a completion of each.
      tell: takes events, from the thread of the engine.
      arrived: when, as `time.perf_counter` has it.
      numbers: of its prompts in the engine, where it is seated.
      num_left: choices that have not come to their end.
    """

    asked: Asked
    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    tell: Callable[[Event], None]
    arrived: float = field(default_factory=time.perf_counter)
    numbers: tuple[int, ...] = ()
    num_left: int = field(init=False)

    def __post_init__(self):
        self.num_left = self.num_choices

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.asked.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Its choices as the engine knows them, by the number of the prompt and their index over
        all prompts; none before it is seated."""
        n = self.asked.n
        return [
            (number, index)
            for place, number in enumerate(self.numbers)
            for index in range(place * n, (place + 1) * n)
        ]
