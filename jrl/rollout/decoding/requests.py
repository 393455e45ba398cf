"""What an engine is asked for, and what it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.rollout.conversations.turns import Turns
from jrl.rollout.decoding.programs.slots import Decoder, Rows
from jrl.rollout.row_sampling import OwnSampling

Finish = Literal["stop", "length", "window"]
"""What ended a response: a stop token, the limit of its length, or for now the tokens that were
asked for at once."""
NOTHING = np.zeros(0, np.int32)


class Sampled(NamedTuple):
    """Tokens of a response as their samplers left them, on the host.

    Attributes:
      tokens: ``[token]`` ids.
      behaviour_logprobs: ``[token]`` in the distribution drawn from, nats.
      old_logprobs: ``[token]`` in the whole policy that sampled, nats.
      versions: ``[token]`` of the weights that sampled.
      choices: ``[column, layer, k]`` experts of every token from the first of the prompt on,
        `num_experts` where it was not run; None where they are not recorded.
    """

    tokens: np.ndarray
    behaviour_logprobs: np.ndarray
    old_logprobs: np.ndarray
    versions: np.ndarray
    choices: np.ndarray | None = None


class Request(NamedTuple):
    """A response that is wanted.

    Attributes:
      prompt: number of the prompt.
      sample: which of the prompt's responses it is; the two tell requests apart.
      tokens: ``[prompt]`` ids.
      max_new_tokens: the limit of the response, in tokens, end-of-sequence included.
      response: ``[tokens]`` ids of the response that were sampled before; it is gone on with.
      window: tokens to be sampled at most before it is handed back unfinished; None is no limit.
      sampled: what was sampled after `response` before the request was taken back; the trajectory
        holds it as if it had been sampled now. None where it was not begun.
      slot: where its row still stands, keys and values too, in a pool that was kept; else None.
      own: how it is drawn, where every request is drawn as it asks (`StreamEngine`); else None.
      turns: the conversation in the response, of a task with environments, whose answers count as
        tokens of the response; else None.
    """

    prompt: int
    sample: int
    tokens: np.ndarray
    max_new_tokens: int
    response: np.ndarray = NOTHING
    window: int | None = None
    sampled: Sampled | None = None
    slot: int | None = None
    own: OwnSampling | None = None
    turns: Turns | None = None

    @property
    def ids(self) -> np.ndarray:
        """What there is already, prompt and response."""
        if not self.begun:
            return self.tokens
        # In the order in which they were sampled: in earlier steps, then in this one.
        before = NOTHING if self.sampled is None else self.sampled.tokens
        return np.concatenate([self.tokens, self.response, before])

    @property
    def length(self) -> int:
        """Tokens of `ids`."""
        return self.start + (0 if self.sampled is None else len(self.sampled.tokens))

    @property
    def start(self) -> int:
        """The place, in prompt and response, of the first token that the request asks for."""
        return len(self.tokens) + len(self.response)

    @property
    def begun(self) -> bool:
        """Whether it comes with tokens of a response."""
        return len(self.response) > 0 or self.sampled is not None

    @property
    def limit(self) -> int:
        """Tokens, prompt and response, with which it is handed back at the latest."""
        whole = len(self.tokens) + self.max_new_tokens
        if self.window is None:
            return whole
        return min(whole, self.start + self.window)


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
      shelf: where it lies on the mesh; None where it was taken off and `request.sampled` is all
        of it.
      row: which of the rows there it is.
    """

    request: Request
    tokens: np.ndarray
    finish: Finish
    shelf: Shelf | None
    row: int

    @property
    def response(self) -> np.ndarray:
        """``[response]`` ids, those that were there before included."""
        return np.concatenate([self.request.response, self.tokens])

    @property
    def length(self) -> int:
        """Tokens of `response`."""
        return len(self.request.response) + len(self.tokens)

    @property
    def sampled(self) -> Sampled:
        """All of it, of a trajectory that was taken off the mesh."""
        assert self.shelf is None and self.request.sampled is not None, "it lies on the mesh"
        return self.request.sampled

    @cached_property
    def behaviour_logprobs(self) -> np.ndarray:
        """``[response]`` of `tokens` in the distribution drawn from, nats; fetched when asked
        for."""
        return self._fetched("behaviour_logprobs")

    @cached_property
    def old_logprobs(self) -> np.ndarray:
        """``[response]`` of `tokens` in the whole policy that sampled, nats; fetched when asked
        for."""
        return self._fetched("old_logprobs")

    @cached_property
    def versions(self) -> np.ndarray:
        """``[response]`` of the weights that sampled `tokens`; fetched when asked for."""
        return self._fetched("versions")

    def _fetched(self, name: str) -> np.ndarray:
        if self.shelf is None:
            return getattr(self.sampled, name)
        column, begin = getattr(self.shelf.rows, name), self.request.start
        return to_host(column)[self.row, begin : begin + len(self.tokens)]


def sampled_in(rows: Rows[np.ndarray], row: int, request: Request) -> Sampled:
    """What was sampled of a request so far.

    Args:
      rows: on the host.
      row: which of them is the request's.
    """
    end = int(rows.lengths[row])

    def column(whole: np.ndarray) -> np.ndarray:
        # A copy: a slice would keep all rows alive on the host.
        return np.array(whole[row, request.start : end])

    return Sampled(
        column(rows.tokens),
        column(rows.behaviour_logprobs),
        column(rows.old_logprobs),
        column(rows.versions),
        None if rows.choices is None else np.array(rows.choices[row, :end]),
    )


def taken_off(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The same without a place on the mesh: each request holds what was sampled. With several
    processes a collective."""
    # Each shelf crosses once, however many of its rows are wanted.
    rows = {id(t.shelf): to_host(t.shelf.rows) for t in trajectories if t.shelf is not None}
    return [
        t
        if t.shelf is None
        else replace(
            t,
            request=t.request._replace(sampled=sampled_in(rows[id(t.shelf)], t.row, t.request)),
            shelf=None,
            row=0,
        )
        for t in trajectories
    ]
