"""Served model: a policy, its tokenizer, and the source of later versions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array

from jrl.rollout.adjustments import Adjustments
from jrl.serving.api.fields import ApiError, invalid_argument
from jrl.serving.api.sampling import check_biases, sampling_parameters
from jrl.serving.api_request import ApiRequest
from jrl.serving.call_stream import CallStream
from jrl.serving.grammar import Grammar, GrammarCompiler
from jrl.tasks import Example
from jrl.tasks.data.conversations import role_content_pairs
from jrl.tasks.data.fields import short
from jrl.tasks.tools.detection import FORMATS
from jrl.text.prompt_format import PromptFormat
from moe.weights import Transformer

DEFAULT_MAX_TOKENS = 16
"""Default `max_tokens` of a completion, as in OpenAI's API; chats have no default limit."""


@runtime_checkable
class Versions(Protocol):
    """Source of a policy's weights."""

    def newest(self) -> int | None:
        """The newest available version; None if no later one can appear."""
        ...

    def load(self) -> tuple[Transformer[Array], int]:
        """Loads the weights of the newest readable version, and returns them with its number.

        Raises:
          ValueError: if none is readable.
        """
        ...


@dataclass(frozen=True)
class ApiModel:
    """A model with its properties in the API.

    Attributes:
      format: encoding of prompts and conversations to tokens.
      length: maximum tokens of prompt plus completion.
      max_tokens: maximum tokens of a completion; None is limited by `length` only.
      created: Unix time of its creation, in seconds.
      defaults: sampling arguments of requests that do not give them.
      default_max_tokens: maximum tokens of a chat's completion, for requests without a limit; None
        is limited by `length` only.
    """

    name: str
    format: PromptFormat
    length: int
    max_tokens: int | None
    created: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_max_tokens: int | None = None

    @property
    def default_adjustments(self) -> Adjustments | None:
        """Adjustments of a request that names none; None if there are none."""
        return sampling_parameters(self.defaults)["adjustments"]

    def prompts(self, request: ApiRequest) -> list[np.ndarray]:
        """Token ids of a request, a row for each prompt.

        Raises:
          ApiError: for a request that the template or tokenizer rejects, a prompt without any
            token, and a bias of a token outside of the vocabulary.
        """
        check_biases(request.adjustments, self.format.tokenizer.vocab_size)
        try:
            rows = [self._conversation(request)] if request.chat else self._texts(request)
        except ValueError as error:
            param = "messages" if request.chat else "prompt"
            raise invalid_argument(param, " ".join(str(error).split())) from error
        return [np.array(row, np.int32) for row in rows]

    def _conversation(self, request: ApiRequest) -> list[int]:
        if self.format.template is None:
            raise ApiError(
                400,
                f"model {self.name!r} has no chat template to format messages with: use "
                "/v1/completions, or serve a checkpoint that has one.",
                "messages",
                "no_chat_template",
            )
        tools = request.tools
        example = Example(
            "",
            "",
            role_content_pairs(request.messages),
            tools=() if tools is None else tools.texts,
            opening=request.messages,
            template_arguments=request.template_arguments,
        )
        self.format.check_shown(example)
        if tools is not None and tools.choice != "none" and self.format.tool_format is None:
            supported = ", ".join(format.name for format in FORMATS)
            raise ApiError(
                400,
                f"the chat template of {self.name!r} calls tools in an unknown format, so that "
                f"calls could not be parsed (supported: {supported}): leave out tools, or give "
                'tool_choice="none".',
                "tools",
                "unsupported_parameter",
            )
        return self.format.encode(example)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.format.tokenizer)

    def grammar(self, request: ApiRequest) -> Grammar:
        """Grammar of a request that needs one, with errors as of `GrammarCompiler.compile`."""
        return self._grammars.compile(request.schema, request.tools, self.format.tool_format)

    def call_stream(self, request: ApiRequest) -> CallStream | None:
        """Reader of the tool calls of a choice; None if it has none, or they stay text."""
        tools, format = request.tools, self.format.tool_format
        if tools is None or tools.choice == "none" or format is None:
            return None
        num_calls = sum(len(turn.get("tool_calls", ())) for turn in request.messages)
        return CallStream(
            self.format.tokenizer, format, tools.parameters, num_calls, tools.parallel
        )

    def _texts(self, request: ApiRequest) -> list[list[int]]:
        assert request.prompts is not None
        tokenizer, rows = self.format.tokenizer, list[list[int]]()
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = tokenizer.with_prefix(tokenizer.encode(prompt))
            else:
                ids = list(prompt)
                for token in ids:
                    if not 0 <= token < tokenizer.vocab_size:
                        raise ValueError(
                            f"prompt has the token {short(token)}, outside of the vocabulary of "
                            f"{tokenizer.vocab_size}: send ids of this model's tokenizer, or text."
                        )
            if not ids:
                raise ValueError("prompt has no token: give a text that is not empty.")
            rows.append(ids)
        return rows

    def limit(self, request: ApiRequest, prompt: np.ndarray) -> int:
        """Limit of the completion's tokens for this prompt; raises ApiError where they exceed the
        server's limit or the context length."""
        available = self.length - len(prompt)
        max_tokens = request.max_tokens
        if max_tokens is None:
            default = self.default_max_tokens if request.chat else DEFAULT_MAX_TOKENS
            limits = (available, self.max_tokens, default)
            max_tokens = min(limit for limit in limits if limit is not None)
        param = "messages" if request.chat else "prompt"
        if self.max_tokens is not None and max_tokens > self.max_tokens:
            raise invalid_argument(
                "max_tokens",
                f"max_tokens={max_tokens} is more than this server allows: request at most "
                f"{self.max_tokens}.",
            )
        needed = max_tokens if request.max_tokens == 0 else max(max_tokens, 1)
        if available < needed:
            raise invalid_argument(
                param,
                f"the prompt has {len(prompt)} tokens and max_tokens={needed}, "
                f"{len(prompt) + needed} in all, and the model is served with a length "
                f"of {self.length}: shorten the prompt, or lower max_tokens.",
                "context_length_exceeded",
            )
        return max_tokens
