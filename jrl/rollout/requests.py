"""What an engine is asked for, and what it gives back."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.rollout.slots import Decoder, Rows

Finish = Literal["stop", "length", "window"]
"""What ended a response: a stop token, the limit of its length, or for now the tokens that were
asked for at once."""
NOTHING = np.zeros(0, np.int32)


class Request(NamedTuple):
    """A response that is wanted.

    Attributes:
      prompt: number of the prompt.
      sample: which of the prompt's responses it is; the two tell requests apart.
      tokens: ``[prompt]`` ids.
      max_new_tokens: the limit of the response, in tokens, end-of-sequence included.
      response: ``[tokens]`` ids of the response that were sampled before; it is gone on with.
      window: tokens to be sampled at most before it is handed back unfinished; None is no limit.
    """

    prompt: int
    sample: int
    tokens: np.ndarray
    max_new_tokens: int
    response: np.ndarray = NOTHING
    window: int | None = None

    @property
    def ids(self) -> np.ndarray:
        """What there is already, prompt and response."""
        if not len(self.response):
            return self.tokens
        return np.concatenate([self.tokens, self.response])

    @property
    def limit(self) -> int:
        """Tokens, prompt and response, with which it is handed back at the latest."""
        whole = len(self.tokens) + self.max_new_tokens
        if self.window is None:
            return whole
        return min(whole, len(self.tokens) + len(self.response) + self.window)


@dataclass
class Shelf:
    """Where rows lie on the mesh that decoded them, until a batch is made of them.

    Attributes:
      decoder: what they were decoded by.
      rows: as they stood in their slots.
      taken: rows that are in use; the others are free.
    """

    decoder: Decoder
    rows: Rows[Array]
    taken: int = 0

    def __len__(self) -> int:
        return self.rows.lengths.shape[0]


@dataclass(frozen=True)
class Trajectory:
    """A response, on the host; what the losses need of it stays on the mesh, and asking for it here
    is a collective where there are several processes.

    Attributes:
      request: what was asked for.
      tokens: ``[response]`` ids that were sampled now, the one that ended it included.
      finish: what ended it.
      shelf: where it lies on the mesh.
      row: which of the rows there it is.
    """

    request: Request
    tokens: np.ndarray
    finish: Finish
    shelf: Shelf
    row: int

    @property
    def response(self) -> np.ndarray:
        """``[response]`` ids, those that were there before included."""
        return np.concatenate([self.request.response, self.tokens])

    @cached_property
    def behaviour_logprobs(self) -> np.ndarray:
        """``[response]`` of `tokens` in the distribution drawn from, nats; fetched when asked
        for."""
        return self._fetched(self.shelf.rows.behaviour_logprobs)

    @cached_property
    def old_logprobs(self) -> np.ndarray:
        """``[response]`` of `tokens` in the whole policy that sampled, nats; fetched when asked
        for."""
        return self._fetched(self.shelf.rows.old_logprobs)

    @cached_property
    def versions(self) -> np.ndarray:
        """``[response]`` of the weights that sampled `tokens`; fetched when asked for."""
        return self._fetched(self.shelf.rows.versions)

    def _fetched(self, column: Any) -> np.ndarray:
        begin = len(self.request.tokens) + len(self.request.response)
        return to_host(column)[self.row, begin : begin + len(self.tokens)]
