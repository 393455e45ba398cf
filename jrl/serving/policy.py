"""Served model: a policy, its tokenizer, and the source of later versions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array

from jrl.rollout.adjustments import MAX_BIASES, NO_ADJUSTMENTS, Adjustments
from jrl.serving.api.fields import ApiError, invalid_argument
from jrl.serving.api.sampling import check_biases, sampling_parameters
from jrl.serving.api_request import ApiRequest
from jrl.serving.grammar import Grammar, GrammarCompiler, LeastTokens
from jrl.serving.transcript import Decode, TokenStrings, Transcript
from jrl.serving.turn_stream import TurnStream, text_decoder, turn_stream
from jrl.tasks import Example
from jrl.tasks.data.conversations import content_of, role_content_pairs
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
          ApiError: for a request that the template or tokenizer rejects, an empty
            prompt, and a bias of a token outside of the vocabulary.
        """
        vocab_size = self.format.tokenizer.vocab_size
        check_biases(request.adjustments, vocab_size)
        if outside := [token for token in request.output.stop_ids if token >= vocab_size]:
            raise invalid_argument(
                "stop_token_ids",
                f"stop_token_ids has the token {outside[0]}, outside of the vocabulary of "
                f"{vocab_size}: leave it out.",
            )
        ends = self.format.tokenizer.stop_ids if request.output.ignores_end else ()
        biases = () if request.adjustments is None else request.adjustments.biases
        if len(biases) + len(ends) > MAX_BIASES:
            raise invalid_argument(
                "logit_bias",
                f"logit_bias has {len(biases)} tokens: give {MAX_BIASES - len(ends)} at most "
                "beside ignore_eos.",
            )
        self._check_characters(request)
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
        self._check_effort(request)
        conversation = self.format.conversation(example)
        if request.ending == "continued":
            return self.format.template.encode_unfinished(conversation)
        return self.format.template.encode(conversation, opened=request.ending == "opened")

    def _check_effort(self, request: ApiRequest) -> None:
        """Raises ApiError for an effort that the template does not read."""
        name = "reasoning_effort"
        if name in request.template_arguments and name not in (
            self.format.tokenizer.usage.chat_template or ""
        ):
            raise invalid_argument(
                name,
                f"the chat template of {self.name!r} does not read {name}: leave it out.",
                "unsupported_parameter",
            )

    @cached_property
    def _max_token_characters(self) -> int:
        """Characters of the longest token."""
        strings = TokenStrings(self.format.tokenizer)
        return max(len(strings.string_of(i)) for i in range(self.format.tokenizer.vocab_size))

    def _check_characters(self, request: ApiRequest) -> None:
        """Raises ApiError for a prompt with more characters than tokens of this length can have,
        before it is tokenized."""
        texts = [each for each in request.prompts or () if isinstance(each, str)]
        if request.chat:
            texts = ["".join(content_of(turn) for turn in request.messages)]
        limit = self.length * self._max_token_characters
        for text in texts:
            if len(text) > limit:
                raise invalid_argument(
                    "messages" if request.chat else "prompt",
                    f"the prompt has {len(text)} characters, and the model is served with a length "
                    f"of {self.length} tokens, at most {limit} characters: shorten the prompt.",
                    "context_length_exceeded",
                )

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.format.tokenizer)

    def grammar(self, request: ApiRequest) -> Grammar:
        """Grammar of a request that needs one, with errors as of `GrammarCompiler.compile`."""
        if request.output.ignores_end:
            raise invalid_argument(
                "ignore_eos",
                "ignore_eos=true does not go with a grammar, which ends: leave it out.",
            )
        return self._grammars.compile(request.rule, request.tools, self.format.tool_format)

    def adjustments(self, request: ApiRequest, grammar: Grammar | None) -> Adjustments | None:
        """Adjustments of one choice, with a constraint of its own if it has any."""
        tokenizer, output, adjustments = self.format.tokenizer, request.output, request.adjustments
        constraint = None if grammar is None else grammar.start()
        if output.min_tokens:
            ends = (*tokenizer.stop_ids, *output.stop_ids)
            constraint = LeastTokens(output.min_tokens, ends, tokenizer.vocab_size, constraint)
        if output.ignores_end:
            adjustments = adjustments or NO_ADJUSTMENTS
            never = [(token, -math.inf) for token in tokenizer.stop_ids]
            adjustments = adjustments._replace(biases=(*adjustments.biases, *never))
        if constraint is None:
            return adjustments
        return (adjustments or NO_ADJUSTMENTS)._replace(constraint=constraint)

    def decoder(self, request: ApiRequest) -> Decode:
        """Decoder of a request's tokens to the text that is read or returned."""
        return text_decoder(request, self.format.tokenizer)

    def transcript(self, request: ApiRequest, prompt: Sequence[int]) -> Transcript:
        """Transcript of a choice with this prompt."""
        return Transcript(
            self.decoder(request),
            self.format.tokenizer.stop_ids,
            request.output,
            request.logprobs,
            () if request.chat else prompt,
            # Harnesses expect an entry for each token, to separate the tokens of the prompt.
            keeps_all=request.scores_prompts or request.output.returns_ids,
        )

    def turn_stream(self, request: ApiRequest, prompt: Sequence[int]) -> TurnStream | None:
        """Reader of the text of a choice with this prompt; None if it is no chat."""
        return turn_stream(request, self.format.tokenizer, self.format.tool_format, prompt)

    def tokenize(self, text: str, begins: bool) -> list[int]:
        """Tokens of a text, with those before a prompt if it `begins` one; raises ApiError for text
        that the tokenizer rejects."""
        tokenizer = self.format.tokenizer
        try:
            ids = tokenizer.encode(text)
        except ValueError as error:
            raise invalid_argument("prompt", " ".join(str(error).split())) from error
        return tokenizer.with_prefix(ids) if begins else ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of tokens, with special tokens written out; raises ApiError for ids outside of the
        vocabulary."""
        try:
            return self.format.tokenizer.decode_special(ids)
        except ValueError as error:
            raise invalid_argument("tokens", " ".join(str(error).split())) from error

    def _texts(self, request: ApiRequest) -> list[list[int]]:
        assert request.prompts is not None
        tokenizer, rows = self.format.tokenizer, list[list[int]]()
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = tokenizer.with_prefix(tokenizer.encode(prompt))
            else:
                ids = list(prompt)
                for token in ids:
                    if not 0 <= token < tokenizer.vocab_size or token in tokenizer.unused_ids:
                        raise ValueError(
                            f"prompt has {short(token)}, an id that no token of this model's "
                            f"vocabulary of {tokenizer.vocab_size} has: send ids of its tokenizer, "
                            "or text."
                        )
            if not ids:
                raise ValueError("prompt has no token: give a text that is not empty.")
            rows.append(ids)
        return rows

    def limit(self, request: ApiRequest, prompt: np.ndarray) -> int:
        """Limit of the completion's tokens for this prompt; raises ApiError if they exceed the
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
        if request.output.min_tokens > max_tokens:
            raise invalid_argument(
                "min_tokens",
                f"min_tokens={request.output.min_tokens} is more than the {max_tokens} tokens that "
                "a completion may have: lower it, or raise max_tokens.",
            )
        return max_tokens
