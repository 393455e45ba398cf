"""Requests in progress, and their responses in OpenAI's format: full ones, and chunks of a stream.

https://platform.openai.com/docs/api-reference/completions and .../chat
"""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jrl.serving.api.fields import ApiError
from jrl.serving.api_request import ApiRequest
from jrl.serving.call_stream import ToolCall
from jrl.serving.grammar import Grammar
from jrl.serving.transcript import TokenLogprobs, TokenStrings

DONE_EVENT = "data: [DONE]\n\n"
"""The last event of a stream."""


@dataclass(frozen=True)
class ChoiceDelta:
    """Increment of a choice that is sent to its client.

    Attributes:
      text: text that is final.
      logprobs: tokens that start in the text, if log-probabilities were requested.
      num_tokens: sampled so far.
      finish: "stop", "length" or "tool_calls" if it has ended, else None.
      version: of the policy that generates it.
      calls: tool calls, of a choice that has ended.
    """

    index: int
    text: str
    logprobs: list[TokenLogprobs]
    num_tokens: int
    finish: str | None
    version: int
    calls: Sequence[ToolCall] = ()


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
      prompt_tokens: of all its prompts.
      echoes: texts of the prompts, if they precede the completions.
    """

    def __init__(
        self,
        request: ApiRequest,
        token_strings: TokenStrings,
        prompt_tokens: int,
        echoes: Sequence[str] = (),
    ):
        self._request, self._token_strings = request, token_strings
        self._prompt_tokens = prompt_tokens
        kind = "chatcmpl" if request.chat else "cmpl"
        self._id, self._created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        prompts = 1 if request.prompts is None else len(request.prompts)
        num_choices = prompts * request.n
        self._echoes = echoes or [""] * prompts
        self._texts = [self._echoes[index // request.n] for index in range(num_choices)]
        self._logprobs_of_choices: list[list[TokenLogprobs]] = [[] for _ in range(num_choices)]
        self._calls: list[Sequence[ToolCall]] = [()] * num_choices
        self._finishes: list[str | None] = [None] * num_choices
        self._tokens, self._started = [0] * num_choices, [False] * num_choices
        self._version = 0

    @property
    def finished(self) -> bool:
        """True if all choices have finished."""
        return None not in self._finishes

    def append(self, delta: ChoiceDelta | PromptDelta) -> None:
        """Appends a delta to its choice, or to all choices of its prompt."""
        index, self._version = delta.index, delta.version
        if isinstance(delta, PromptDelta):
            n = self._request.n
            for choice in range(index * n, (index + 1) * n):
                self._logprobs_of_choices[choice] += delta.logprobs
            return
        self._texts[index] += delta.text
        self._logprobs_of_choices[index] += self._after_echo(index, delta.logprobs)
        self._tokens[index], self._finishes[index] = delta.num_tokens, delta.finish
        self._calls[index] = delta.calls

    def _after_echo(self, index: int, logprobs: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Tokens of a choice with offsets in its text, which begins with the echoed prompt."""
        length = len(self._echoes[index // self._request.n])
        return [replace(each, offset=length + each.offset) for each in logprobs]

    def body(self) -> dict[str, Any]:
        """Body of a response that is not a stream."""
        choices = []
        for index, text in enumerate(self._texts):
            content: dict[str, Any] = {"text": text}
            if self._request.chat:
                calls = [_call_entry(call) for call in self._calls[index]]
                message = {"role": "assistant", "content": text or None if calls else text}
                message |= {"refusal": None} | ({"tool_calls": calls} if calls else {})
                content = {"message": message}
            choices.append(
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(self._logprobs_of_choices[index]),
                    "finish_reason": self._finishes[index],
                }
            )
        kind = "chat.completion" if self._request.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self._usage()}

    def chunks(self, delta: ChoiceDelta | PromptDelta) -> str:
        """Server-sent events of a delta in a stream; `append` it first."""
        if isinstance(delta, PromptDelta):
            return ""  # sent with the echo
        index, events = delta.index, ""
        if not self._started[index]:
            self._started[index] = True
            if self._request.chat:
                events += self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            elif self._request.echo:
                all_logprobs = self._logprobs_of_choices[index]
                of_prompt = all_logprobs[: len(all_logprobs) - len(delta.logprobs)]
                echo = {"text": self._echoes[index // self._request.n]}
                events += self._chunk(index, {**echo, "logprobs": self._logprobs(of_prompt)})
        if delta.text or delta.logprobs:
            content: dict[str, Any] = {"text": delta.text}
            if self._request.chat:
                content = {"delta": {"content": delta.text}}
            content["logprobs"] = self._logprobs(self._after_echo(index, delta.logprobs))
            events += self._chunk(index, content)
        if delta.calls:
            calls = [{"index": i, **_call_entry(call)} for i, call in enumerate(delta.calls)]
            events += self._chunk(index, {"delta": {"tool_calls": calls}})
        if delta.finish is not None:
            content = {"delta": {}} if self._request.chat else {"text": ""}
            events += self._chunk(index, {**content, "finish_reason": delta.finish})
        return events

    def end(self) -> str:
        """The last events of a stream."""
        if not self._request.include_usage:
            return DONE_EVENT
        return event({**self._chunk_head(), "choices": [], "usage": self._usage()}) + DONE_EVENT

    def _chunk(self, index: int, content: dict[str, Any]) -> str:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **content}
        usage = {"usage": None} if self._request.include_usage else {}
        return event({**self._chunk_head(), "choices": [choice], **usage})

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

    def _usage(self) -> dict[str, int]:
        sampled = sum(self._tokens)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self._prompt_tokens + sampled,
        }

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        if self._request.chat:
            content = [self._logprobs_entry(position) for position in positions]
            return {"content": content, "refusal": None}
        strings, top_logprobs = list[str](), list[dict[str, float] | None]()
        for position in positions:
            strings.append(self._token_strings.string_of(position.token))
            if position.logprob is None:
                top_logprobs.append(None)
                continue
            alternatives = {
                self._token_strings.string_of(token): value
                for token, value in position.top_logprobs
            }
            top_logprobs.append({**alternatives, strings[-1]: position.logprob})
        return {
            "tokens": strings,
            "token_logprobs": [position.logprob for position in positions],
            "top_logprobs": top_logprobs,
            "text_offset": [position.offset for position in positions],
        }

    def _logprobs_entry(self, position: TokenLogprobs) -> dict[str, Any]:
        alternatives = [self._token_entry(token, value) for token, value in position.top_logprobs]
        return {**self._token_entry(position.token, position.logprob), "top_logprobs": alternatives}

    def _token_entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        content = list(self._token_strings.bytes_of(token))
        return {"token": self._token_strings.string_of(token), "logprob": logprob, "bytes": content}


def _call_entry(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def fingerprint(version: int) -> str:
    """`system_fingerprint` of a response: the policy version that generated it."""
    return f"step-{version}"


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
