"""What is served: a policy, its tokenizer, and where later versions come from."""

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
"""Tokens of a completion whose client names no limit, as OpenAI has it; chats have none."""


@runtime_checkable
class Versions(Protocol):
    """Where the weights of a policy come from."""

    def newest(self) -> int | None:
        """The newest version there is; None where there is none to load later."""
        ...

    def load(self) -> tuple[Transformer[Array], int]:
        """The weights of the newest version that can be read, and which it is.

        Raises:
          ValueError: where none can.
        """
        ...


@dataclass(frozen=True)
class Served:
    """A model as clients know it.

    Attributes:
      name: what they ask for.
      format: how prompts and conversations become tokens.
      length: tokens of prompt and completion together, at most.
      max_tokens: of a completion, at most; None is what `length` leaves.
      created: Unix time of its beginning, in seconds.
    """

    name: str
    format: PromptFormat
    length: int
    max_tokens: int | None
    created: int

    def prompts(self, asked: Asked) -> list[np.ndarray]:
        """The ids of what is asked, a row for each prompt.

        Raises:
          Refused: for what template or tokenizer refuse, and for a prompt without any token.
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
                ids = tokenizer.begun(tokenizer.encode(prompt))
            else:
                ids = list(prompt)
                tokenizer.decode(ids)  # refuses ids outside of the vocabulary
            if not ids:
                raise ValueError("prompt has no token: give a text that is not empty.")
            rows.append(ids)
        return rows

    def limit(self, asked: Asked, prompt: np.ndarray) -> int:
        """Tokens that a completion of this prompt may have.

        Raises:
          Refused: where there is no room for them.
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
