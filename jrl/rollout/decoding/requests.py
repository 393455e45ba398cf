"""Requests to a rollout engine, and the trajectories that it returns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import jax
import numpy as np

from jrl.processes.agreement import to_host
from jrl.rollout.adjustments import Constraint
from jrl.rollout.conversation import Conversation
from jrl.rollout.decoding.slots import OutputBuffer, RecentTokens, TokenRows, TopTokens
from jrl.rollout.sampling import RequestSampling

Finish = Literal["stop", "length", "window"]
"""Finish reason of a response: a stop token, its length limit, or the window of a partial
rollout."""
NO_TOKENS = np.zeros(0, np.int32)


class Sampled(NamedTuple):
    """Sampled tokens of a response with their records, on the host.

    Attributes:
      tokens: ``[token]`` ids.
      behaviour_logprobs: ``[token]`` log-probabilities in the distribution sampled from, nats.
      old_logprobs: ``[token]`` log-probabilities in the full policy that sampled, nats.
      versions: ``[token]`` versions of the weights that sampled.
      choices: ``[position, layer, k]`` expert ids of every token from the first of the prompt on,
        `num_experts` if it was not run; None if they are not recorded.
    """

    tokens: np.ndarray
    behaviour_logprobs: np.ndarray
    old_logprobs: np.ndarray
    versions: np.ndarray
    choices: np.ndarray | None = None


class Request(NamedTuple):
    """Request for one response.

    Attributes:
      prompt: id of the prompt.
      sample: index of the response among the responses to its prompt; the two identify a request.
      tokens: ``[prompt]`` ids.
      max_new_tokens: length limit of the response in tokens, end-of-sequence included.
      response: ``[tokens]`` ids of the response from earlier steps, to be continued.
      window: maximum tokens to sample before it is returned unfinished; None is no limit.
      sampled: tokens sampled after `response` before the request was suspended; the trajectory
        contains them as if they had been sampled now. None if it was not started.
      slot: slot in which its row and KV cache were kept; else None.
      sampling: sampling parameters of the request, if each has its own; else None.
      conversation: the conversation in the response, of a task with environments, whose answers
        are tokens of the response; else None.
    """

    prompt: int
    sample: int
    tokens: np.ndarray
    max_new_tokens: int
    response: np.ndarray = NO_TOKENS
    window: int | None = None
    sampled: Sampled | None = None
    slot: int | None = None
    sampling: RequestSampling | None = None
    conversation: Conversation | None = None

    @property
    def ids(self) -> np.ndarray:
        """Token ids so far, prompt and response."""
        if not self.has_response:
            return self.tokens
        # In the order of sampling: earlier steps, then this one.
        before = NO_TOKENS if self.sampled is None else self.sampled.tokens
        return np.concatenate([self.tokens, self.response, before])

    @property
    def length(self) -> int:
        """Tokens of `ids`."""
        return self.start + (0 if self.sampled is None else len(self.sampled.tokens))

    @property
    def start(self) -> int:
        """Position, in prompt and response, of the first token that the request samples."""
        return len(self.tokens) + len(self.response)

    @property
    def has_response(self) -> bool:
        """True if the request contains tokens of a response already."""
        return len(self.response) > 0 or self.sampled is not None

    @property
    def needs_top_tokens(self) -> bool:
        """True if the request asks for the top-k tokens of each position."""
        return self.sampling is not None and self.sampling.needs_top_tokens

    @property
    def constraint(self) -> Constraint | None:
        """Tokens that the response may consist of; None allows all."""
        return None if self.sampling is None else self.sampling.constraint

    @property
    def limit(self) -> int:
        """Maximum length, prompt and response, at which it is returned."""
        max_length = len(self.tokens) + self.max_new_tokens
        if self.window is None:
            return max_length
        return min(max_length, self.start + self.window)


@dataclass(frozen=True)
class Trajectory:
    """Response on the host. Arrays for the losses stay on the mesh; reading them here is a
    collective in a run of multiple processes.

    Attributes:
      request: the request.
      tokens: ``[response]`` ids that were sampled now, including the one that ended it.
      finish: the finish reason.
      buffer: its output buffer on the mesh; None if it was copied to the host and
        `request.sampled` contains all of it.
      row: its row in the buffer.
    """

    request: Request
    tokens: np.ndarray
    finish: Finish
    buffer: OutputBuffer | None
    row: int

    @property
    def response(self) -> np.ndarray:
        """Token ids of the whole response, ``[response]``, including tokens of earlier steps."""
        return np.concatenate([self.request.response, self.tokens])

    @property
    def length(self) -> int:
        """Tokens of `response`."""
        return len(self.request.response) + len(self.tokens)

    @property
    def sampled(self) -> Sampled:
        """Sampled tokens with their records, for a trajectory that is on the host."""
        assert self.buffer is None and self.request.sampled is not None, "it is on the devices"
        return self.request.sampled

    @cached_property
    def behaviour_logprobs(self) -> np.ndarray:
        """Log-probabilities ``[response]`` of `tokens` in the distribution sampled from, nats;
        fetched on first access."""
        return self._fetch("behaviour_logprobs")

    @cached_property
    def old_logprobs(self) -> np.ndarray:
        """Log-probabilities ``[response]`` of `tokens` in the full policy that sampled, nats;
        fetched on first access."""
        return self._fetch("old_logprobs")

    @cached_property
    def versions(self) -> np.ndarray:
        """Versions ``[response]`` of the weights that sampled `tokens`; fetched on first access."""
        return self._fetch("versions")

    def _fetch(self, name: str) -> np.ndarray:
        if self.buffer is None:
            return getattr(self.sampled, name)
        column, begin = getattr(self.buffer.rows, name), self.request.start
        return to_host(column)[self.row, begin : begin + len(self.tokens)]


@dataclass(frozen=True)
class StreamChunk:
    """New tokens of a row since the last scheduler step.

    Attributes:
      request: the request.
      slot: slot of the row, also if it has ended.
      tokens: ``[token]`` ids, including a stop token that ended it.
      logprobs: ``[token]`` log-probabilities in the policy at temperature 1, nats.
      top_tokens: top-k tokens, ``[token, k]``; None if they were not requested.
      finish: the finish reason; None if it continues.
      num_cached: tokens of the prompt from the prefix cache (`PrefixCache`).
    """

    request: Request
    slot: int
    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: TopTokens[np.ndarray] | None
    finish: Finish | None
    num_cached: int = 0

    def accept(self) -> None:
        """Tells the constraint of the request, if it has one, of the new tokens."""
        if self.request.constraint is not None:
            self.request.constraint.accept(self.tokens.tolist())


def make_chunk(
    request: Request,
    recent: RecentTokens[np.ndarray],
    slot: int,
    count: int,
    stop_ids: Sequence[int] | None,
    num_cached: int = 0,
) -> StreamChunk:
    """Chunk of a row from the latest positions of all rows.

    Args:
      count: number of new tokens.
      stop_ids: tokens that end a row, if it has ended; else None.
      num_cached: as in `StreamChunk`.
    """
    tokens, logprobs = (np.array(x[slot, :count]) for x in (recent.tokens, recent.logprobs))
    top_tokens, finish = None, None
    if request.needs_top_tokens and recent.top_tokens is not None:
        top_tokens = jax.tree.map(lambda x: np.array(x[slot, :count]), recent.top_tokens)
    if stop_ids is not None:
        finish = "stop" if tokens[-1] in stop_ids else "length"
    return StreamChunk(request, slot, tokens, logprobs, top_tokens, finish, num_cached)


def read_sampled(rows: TokenRows[np.ndarray], row: int, request: Request) -> Sampled:
    """Sampled tokens of a request so far, with their records, from its row of `rows`."""
    end = int(rows.lengths[row])

    def column(array: np.ndarray) -> np.ndarray:
        # A copy: a slice would keep all rows alive on the host.
        return np.array(array[row, request.start : end])

    return Sampled(
        column(rows.tokens),
        column(rows.behaviour_logprobs),
        column(rows.old_logprobs),
        column(rows.versions),
        None if rows.choices is None else np.array(rows.choices[row, :end]),
    )


def move_to_host(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Copies trajectories from the mesh to the host, into `request.sampled` of each. A collective
    in a run of multiple processes."""
    # Each output buffer is copied once, however many of its rows are needed.
    rows = {id(t.buffer): to_host(t.buffer.rows) for t in trajectories if t.buffer is not None}
    return [
        t
        if t.buffer is None
        else replace(
            t,
            request=t.request._replace(sampled=read_sampled(rows[id(t.buffer)], t.row, t.request)),
            buffer=None,
            row=0,
        )
        for t in trajectories
    ]
