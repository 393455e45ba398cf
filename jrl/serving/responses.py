"""Requests in progress, and their responses in OpenAI's format: full ones, and chunks of a stream.

https://platform.openai.com/docs/api-reference/completions and .../chat
"""

import base64
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jrl.serving.api.fields import ApiError
from jrl.serving.api_request import ApiRequest
from jrl.serving.grammar import Grammar
from jrl.serving.transcript import TokenLogprobs, TokenStrings
from jrl.serving.turn_stream import ToolCall, TurnDelta

DONE_EVENT = "data: [DONE]\n\n"
"""The last event of a stream."""


@dataclass(frozen=True)
class ChoiceDelta:
    """Increment of a choice that is sent to its client.

    Attributes:
      turn: text that is final, with the reasoning and calls of a chat.
      logprobs: tokens that start in the text, if log-probabilities were requested.
      token_ids: sampled since the last delta.
      num_tokens: sampled so far.
      finish: "stop", "length" or "tool_calls" if it has ended, else None.
      version: of the policy that generates it.
      experts: expert ids ``[position, layer, k]`` of prompt and completion but the last token, at
        its end, if they are returned.
      num_cached: tokens of the prompt from the prefix cache (`PrefixCache`).
    """

    index: int
    turn: TurnDelta
    logprobs: list[TokenLogprobs]
    token_ids: list[int]
    num_tokens: int
    finish: str | None
    version: int
    experts: np.ndarray | None = None
    num_cached: int = 0


@dataclass(frozen=True)
class PromptDelta:
    """Log-probabilities of all tokens of a prompt, which come before the deltas of its choices."""

    index: int
    logprobs: list[TokenLogprobs]
    version: int


Event = ChoiceDelta | PromptDelta | ApiError
"""Event of a request: a delta, or the error that ends it."""


@dataclass(eq=False)
class Job:
    """Request between its arrival and its end.

    Attributes:
      prompts: token ids of each prompt.
      limits: most tokens of a completion, for each prompt.
      on_event: callback for events, called from the engine's thread.
      grammar: of the choices; None allows any text.
      arrived: time of arrival by `time.perf_counter`.
      prompt_ids: ids of its prompts in the engine, once it is scheduled.
      num_left: choices that have not finished.
    """

    request: ApiRequest
    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    on_event: Callable[[Event], None]
    grammar: Grammar | None = None
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


class ResponseBuilder:
    """Response to one request, built up incrementally.

    Args:
      prompts: token ids of its prompts.
      echoes: texts of the prompts, if they precede the completions.
    """

    def __init__(
        self,
        request: ApiRequest,
        token_strings: TokenStrings,
        prompts: Sequence[np.ndarray],
        echoes: Sequence[str] = (),
    ):
        self._request, self._token_strings = request, token_strings
        self._prompts = prompts
        kind = "chatcmpl" if request.chat else "cmpl"
        self._id, self._created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        num_choices = len(prompts) * request.n
        self._echoes = echoes or [""] * len(prompts)
        self._texts = [self._echoes[index // request.n] for index in range(num_choices)]
        self._reasonings = [""] * num_choices
        self._logprobs_of_choices: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        self._logprobs_of_prompts: list[list[TokenLogprobs]] = [[] for _ in prompts]
        self._calls: list[Sequence[ToolCall]] = [()] * num_choices
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._finishes: list[str | None] = [None] * num_choices
        self._tokens, self._started = [0] * num_choices, [False] * num_choices
        self._experts: list[np.ndarray | None] = [None] * num_choices
        self._num_cached = [0] * len(prompts)
        self._version = 0

    @property
    def finished(self) -> bool:
        """True if all choices have finished."""
        return None not in self._finishes

    def append(self, delta: ChoiceDelta | PromptDelta) -> None:
        """Appends a delta to its choice, or to all choices of its prompt."""
        index, self._version = delta.index, delta.version
        if isinstance(delta, PromptDelta):
            self._logprobs_of_prompts[index] = delta.logprobs
            if self._request.echo and self._request.logprobs:
                top = self._request.top_logprobs
                echoed = [replace(x, top_logprobs=x.top_logprobs[:top]) for x in delta.logprobs]
                n = self._request.n
                for choice in range(index * n, (index + 1) * n):
                    self._logprobs_of_choices[choice] += echoed
            return
        self._texts[index] += delta.turn.content
        self._reasonings[index] += delta.turn.reasoning
        self._logprobs_of_choices[index] += self._after_echo(index, delta.logprobs)
        self._tokens[index], self._finishes[index] = delta.num_tokens, delta.finish
        self._token_ids[index] += delta.token_ids
        self._calls[index], self._experts[index] = delta.turn.calls, delta.experts
        # Further choices of a prompt begin with the tokens of the first.
        if not index % self._request.n:
            self._num_cached[index // self._request.n] = delta.num_cached

    def _after_echo(self, index: int, logprobs: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Tokens of a choice with offsets in its text, which begins with the echoed prompt."""
        length = len(self._echoes[index // self._request.n])
        return [replace(each, offset=length + each.offset) for each in logprobs]

    def body(self) -> dict[str, Any]:
        """Body of a response that is not a stream."""
        request, choices = self._request, []
        if request.tokens_only:
            return self._token_body()
        for index, text in enumerate(self._texts):
            content: dict[str, Any] = {"text": text}
            if request.chat:
                content = {"message": self._message(index)}
            else:
                content |= self._of_prompt(index // request.n)
            if request.output.returns_ids:
                content["token_ids"] = self._token_ids[index]
            choices.append(
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(self._logprobs_of_choices[index]),
                    "finish_reason": self._finishes[index],
                }
            )
        kind = "chat.completion" if request.chat else "text_completion"
        of_prompt = self._of_prompt(0) if request.chat else {}
        return {**self._head(kind), "choices": choices, "usage": self._usage(), **of_prompt}

    def _message(self, index: int) -> dict[str, Any]:
        """Message of a chat's choice."""
        calls, text = [_call_entry(call) for call in self._calls[index]], self._texts[index]
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
        message["refusal"] = None
        if (reasoning := self._reasonings[index]) and self._request.shows_reasoning:
            message["reasoning_content"] = reasoning
        return message | ({"tool_calls": calls} if calls else {})

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """Token ids and log-probabilities of a prompt, if they are returned."""
        output, fields = self._request.output, dict[str, Any]()
        if output.returns_ids:
            fields["prompt_token_ids"] = self._prompts[index].tolist()
        if output.prompt_logprobs is not None:
            positions = self._logprobs_of_prompts[index]
            fields["prompt_logprobs"] = [self._prompt_entry(position) for position in positions]
        return fields

    def _prompt_entry(self, position: TokenLogprobs) -> dict[str, Any] | None:
        """Log-probabilities of a token of a prompt and of the top tokens, by their ids as texts."""
        if position.logprob is None:
            return None
        num_top = self._request.output.prompt_logprobs or 0
        actual = position.token, position.logprob, position.rank
        top = [(*pair, rank) for rank, pair in enumerate(position.top_logprobs[:num_top], start=1)]
        return {
            str(token): {
                "logprob": value,
                "rank": rank,
                "decoded_token": self._token_strings.string_of(token),
            }
            for token, value, rank in (*top, actual)
        }

    def _token_body(self) -> dict[str, Any]:
        """Body of a response of token ids, without text."""
        choices = [
            {
                "index": index,
                "token_ids": ids,
                "logprobs": self._chat_logprobs(self._logprobs_of_choices[index]),
                "finish_reason": self._finishes[index],
                "routed_experts": self._experts_entry(index),
            }
            for index, ids in enumerate(self._token_ids)
        ]
        prompt_logprobs = self._of_prompt(0).get("prompt_logprobs")
        return {
            "request_id": self._id,
            "model": self._request.model,
            "system_fingerprint": fingerprint(self._version),
            "choices": choices,
            "prompt_logprobs": prompt_logprobs,
            "usage": self._usage(),
        }

    def _experts_entry(self, index: int) -> dict[str, Any] | None:
        """Expert ids of a choice as text, from the token on that the request names."""
        experts = self._experts[index]
        if experts is None:
            return None
        start = self._request.experts_start
        rows = np.ascontiguousarray(experts[start:])
        data = base64.b64encode(rows.tobytes()).decode()
        return {"data": data, "shape": rows.shape, "dtype": str(rows.dtype), "start": start}

    def chunks(self, delta: ChoiceDelta | PromptDelta) -> str:
        """Server-sent events of a delta in a stream; `append` it first."""
        if isinstance(delta, PromptDelta):
            return ""  # sent with the echo
        index, events = delta.index, ""
        if not self._started[index]:
            self._started[index] = True
            returns_ids = self._request.output.returns_ids
            if self._request.chat:
                content = {"delta": {"role": "assistant", "content": ""}}
                events += self._chunk(index, content, self._of_prompt(0) if returns_ids else {})
            elif returns_ids and not self._request.echo:
                of_prompt = self._of_prompt(index // self._request.n)
                events += self._chunk(index, {"text": "", **of_prompt})
            elif self._request.echo:
                all_logprobs = self._logprobs_of_choices[index]
                of_prompt = all_logprobs[: len(all_logprobs) - len(delta.logprobs)]
                number = index // self._request.n
                echo = {"text": self._echoes[number], **self._of_prompt(number)}
                events += self._chunk(index, {**echo, "logprobs": self._logprobs(of_prompt)})
        turn = delta.turn
        reasoning = turn.reasoning if self._request.shows_reasoning else ""
        token_ids = delta.token_ids if self._request.output.returns_ids else []
        if turn.content or reasoning or delta.logprobs or token_ids:
            content: dict[str, Any] = {"text": turn.content}
            if self._request.chat:
                parts = {"reasoning_content": reasoning} if reasoning else {}
                if turn.content or not parts:
                    parts["content"] = turn.content
                content = {"delta": parts}
            content["logprobs"] = self._logprobs(self._after_echo(index, delta.logprobs))
            if self._request.output.returns_ids:
                content["token_ids"] = token_ids
            events += self._chunk(index, content)
        if turn.calls:
            calls = [{"index": i, **_call_entry(call)} for i, call in enumerate(turn.calls)]
            events += self._chunk(index, {"delta": {"tool_calls": calls}})
        if delta.finish is not None:
            content = {"delta": {}} if self._request.chat else {"text": ""}
            events += self._chunk(index, {**content, "finish_reason": delta.finish})
        return events

    def error(self, error: ApiError) -> str:
        """The last event of a stream that fails."""
        return event(error.body)

    def end(self) -> str:
        """The last events of a stream."""
        if not self._request.include_usage:
            return DONE_EVENT
        return event({**self._chunk_head(), "choices": [], "usage": self._usage()}) + DONE_EVENT

    def _chunk(
        self, index: int, content: dict[str, Any], head: Mapping[str, Any] | None = None
    ) -> str:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **content}
        so_far = self._usage() if self._request.continuous_usage else None
        usage = {"usage": so_far} if self._request.include_usage else {}
        return event({**self._chunk_head(), **(head or {}), "choices": [choice], **usage})

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._request.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "system_fingerprint": fingerprint(self._version),
        }

    def _usage(self) -> dict[str, Any]:
        prompt_tokens, sampled = sum(map(len, self._prompts)), sum(self._tokens)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        if self._request.chat:
            return self._chat_logprobs(positions)
        strings, top_logprobs = list[str](), list[dict[str, float] | None]()
        for position in positions:
            strings.append(self._string_of(position.token))
            if position.logprob is None:
                top_logprobs.append(None)
                continue
            alternatives = {self._string_of(token): v for token, v in position.top_logprobs}
            top_logprobs.append({**alternatives, strings[-1]: position.logprob})
        return {
            "tokens": strings,
            "token_logprobs": [position.logprob for position in positions],
            "top_logprobs": top_logprobs,
            "text_offset": [position.offset for position in positions],
        }

    def _chat_logprobs(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content = [self._logprobs_entry(position) for position in positions]
        return {"content": content, "refusal": None}

    def _string_of(self, token: int) -> str:
        """String of a token in log-probabilities."""
        names_ids = self._request.output.names_ids
        return f"token_id:{token}" if names_ids else self._token_strings.string_of(token)

    def _logprobs_entry(self, position: TokenLogprobs) -> dict[str, Any]:
        alternatives = [self._token_entry(token, value) for token, value in position.top_logprobs]
        return {**self._token_entry(position.token, position.logprob), "top_logprobs": alternatives}

    def _token_entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        content = list(self._token_strings.bytes_of(token))
        return {"token": self._string_of(token), "logprob": logprob, "bytes": content}


def _call_entry(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def fingerprint(version: int) -> str:
    """`system_fingerprint` of a response: the policy version that generated it."""
    return f"step-{version}"


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
