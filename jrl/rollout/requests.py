"""What an engine is asked for, and what it gives back."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.recipes.base.batch import Batch

Finish = Literal["stop", "length"]
"""What ended a response: a stop token, or the limit of its length."""


class Request(NamedTuple):
    """A response that is wanted.

    Attributes:
      prompt: number of the prompt.
      sample: which of the prompt's responses it is; the two tell requests apart.
      tokens: ``[prompt]`` ids.
      max_new_tokens: the limit of the response, in tokens, end-of-sequence included.
    """

    prompt: int
    sample: int
    tokens: np.ndarray
    max_new_tokens: int


@dataclass(frozen=True)
class Trajectory:
    """A response, on the host; what the losses need of it stays on the mesh, and asking for it here
    is a collective where there are several processes.

    Attributes:
      request: what was asked for.
      tokens: ``[response]`` ids that were sampled, the one that ended it included.
      version: of the weights that sampled it.
      finish: what ended it.
      batch: the rows it was sampled with, on the mesh.
      row: which of them it is.
    """

    request: Request
    tokens: np.ndarray
    version: int
    finish: Finish
    batch: Batch[Array]
    row: int

    @cached_property
    def behaviour_logprobs(self) -> np.ndarray:
        """``[response]`` in the distribution drawn from, nats; fetched when asked for."""
        return self._fetched(self.batch.behaviour_logprobs)

    @cached_property
    def old_logprobs(self) -> np.ndarray:
        """``[response]`` in the whole policy that sampled, nats; fetched when asked for."""
        return self._fetched(self.batch.old_logprobs)

    def _fetched(self, column: Array | None) -> np.ndarray:
        assert column is not None
        begin = column.shape[1] - self.request.max_new_tokens
        return to_host(column)[self.row, begin : begin + len(self.tokens)]
