"""Served model: a policy, its tokenizer, and the source of later versions."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array

from jrl.serving.asked import Asked
from jrl.serving.refusal import Refused, wrong
from jrl.tasks import Example
from jrl.text.prompt_format import PromptFormat
from moe.weights import Transformer

OF_COMPLETION = 16
"""Default `max_tokens` of a completion, as in OpenAI's API; chats have no default limit."""


@runtime_checkable
class Versions(Protocol):
    """Source of a policy's weights."""

    def newest(self) -> int | None:
        """The newest available version; None where no later one can appear."""
        ...

    def load(self) -> tuple[Transformer[Array], int]:
        """Loads the weights of the newest readable version, and returns them with its number.

        Raises:
          ValueError: where none is readable.
        """
        ...


@dataclass(frozen=True)
class Served:
    """A model as clients know it.

    Attributes:
      name: model name in requests.
      format: encoding of prompts and conversations to tokens.
      length: most tokens of prompt plus completion.
      max_tokens: most tokens of a completion; None is limited by `length` only.
      created: Unix time of its creation, in seconds.
    """

    name: str
    format: PromptFormat
    length: int
    max_tokens: int | None
    created: int

    def prompts(self, asked: Asked) -> list[np.ndarray]:
        """Token ids of a request, a row for each prompt.

        Raises:
          Refused: where template or tokenizer reject it, and for a prompt without any token.
        """
        try:
            rows = [self._conversation(asked)] if asked.prompts is None else self._texts(asked)
        except ValueError as error:
            param = "messages" if asked.chat else "prompt"
            raise wrong(param, " ".join(str(error).split())) from error
        return [np.array(row, np.int32) for row in rows]

    def _conversation(self, asked: Asked) -> list[int]:
        if self.format.template is None:
            raise Refused(
                400,
                f"model {self.name!r} has no chat template to write messages with: ask "
                "/v1/completions, or serve a checkpoint that has one.",
                "messages",
                "no_chat_template",
            )
        return self.format.encode(
            Example("", "", asked.messages, template_arguments=asked.template_arguments)
        )

    def _texts(self, asked: Asked) -> list[list[int]]:
        assert asked.prompts is not None
        tokenizer, rows = self.format.tokenizer, list[list[int]]()
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                ids = tokenizer.with_prefix(tokenizer.encode(prompt))
            else:
                ids = list(prompt)
                tokenizer.decode(ids)  # refuses ids outside of the vocabulary
            if not ids:
                raise ValueError("prompt has no token: give a text that is not empty.")
            rows.append(ids)
        return rows

    def limit(self, asked: Asked, prompt: np.ndarray) -> int:
        """Limit of the completion's tokens for this prompt.

        Raises:
          Refused: where they exceed the server's limit or the context length.
        """
        room = self.length - len(prompt)
        wanted = asked.max_tokens
        if wanted is None:
            limits = (room, self.max_tokens, None if asked.chat else OF_COMPLETION)
            wanted = min(limit for limit in limits if limit is not None)
        param = "messages" if asked.chat else "prompt"
        if self.max_tokens is not None and wanted > self.max_tokens:
            raise wrong(
                "max_tokens",
                f"max_tokens={wanted} is more than this server gives: ask for {self.max_tokens} at "
                "most.",
            )
        if room < max(wanted, 1):
            raise wrong(
                param,
                f"the prompt has {len(prompt)} tokens and max_tokens={max(wanted, 1)}, "
                f"{len(prompt) + max(wanted, 1)} in all, and the model is served with a length of "
                f"{self.length}: shorten the prompt, or lower max_tokens.",
                "context_length_exceeded",
            )
        return wanted
