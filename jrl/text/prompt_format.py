"""From an example to the tokens of its prompt: as it is, or through a chat template."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jrl.config.run import RunConfig
from jrl.tasks import Example
from jrl.text.chat import ChatTemplate, today, unused
from jrl.text.tokenizer import Tokenizer

OF_CHECKPOINT, NONE = "checkpoint", "none"
"""What `RunConfig.chat_template` is but for a file."""


@dataclass(frozen=True)
class PromptFormat:
    """How prompts are laid out.

    Attributes:
      tokenizer: between text and tokens.
      template: makes tokens of a conversation; None takes prompts as they are.
      system_prompt: the first message of every conversation that has no system message; None
        leaves it to the example's own instruction.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    system_prompt: str | None = None

    def messages(self, example: Example) -> tuple[tuple[str, str], ...]:
        """The conversation of an example: its own, or its prompt as the user's one message."""
        own = example.messages or (("user", example.prompt),)
        if own[0][0] == "system":
            return own
        if self.system_prompt is not None:
            return (("system", self.system_prompt), *own)
        if not example.instruction:
            return own
        if self._takes_system:
            return (("system", example.instruction), *own)
        (role, first), *rest = own
        return ((role, f"{example.instruction}\n{first}"), *rest)

    @cached_property
    def _takes_system(self) -> bool:
        """Whether the template writes a system message; some refuse or pass over one."""
        assert self.template is not None
        mark = unused("")
        try:
            return mark in self.template.render([("system", mark), ("user", "?")])
        except ValueError:
            return False

    def encode(self, example: Example) -> list[int]:
        """The tokens of a prompt.

        Raises:
          ValueError: for a conversation without a template, a prompt without any token, and for
            what template or tokenizer refuse.
        """
        if self.template is not None:
            return self._some(self.template.encode(self.messages(example), example.tools), example)
        if example.messages:
            raise ValueError(
                f"the prompt {example.prompt[:60]!r} is a conversation, and the model has no chat "
                "template to write it with: give --chat-template FILE, or texts as prompts."
            )
        ids = [*self.tokenizer.prefix, *self.tokenizer.encode(example.prompt)]
        return self._some(ids, example)

    def _some(self, ids: list[int], example: Example) -> list[int]:
        if not ids:
            raise ValueError(
                f"the prompt {example.prompt[:60]!r} has no token, and the tokenizer puts none "
                "before it, so nothing could be predicted from it: give a prompt with content."
            )
        return ids


def prompt_format(run: RunConfig, tokenizer: Tokenizer) -> PromptFormat:
    """The format of a run.

    Args:
      tokenizer: with the template, of the checkpoint or of `with_template`.

    Raises:
      ValueError: for a template that cannot be used, and a system prompt without one.
    """
    template = None
    if run.chat_template != NONE and tokenizer.usage.chat_template is not None:
        template = ChatTemplate(tokenizer)
    if run.system_prompt is not None and template is None:
        raise ValueError(
            f"system_prompt={run.system_prompt[:60]!r} needs a chat template to be written with, "
            "and there is none: give --chat-template FILE, or write it into the prompts."
        )
    return PromptFormat(tokenizer, template, run.system_prompt)


def with_template(run: RunConfig, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of a new run, with the template of the file that the run names, if it does."""
    if run.chat_template in (OF_CHECKPOINT, NONE):
        return tokenizer
    try:
        source = Path(run.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise ValueError(
            f"chat_template={run.chat_template!r} cannot be read ({reason}): give the path of a "
            f"Jinja template, {OF_CHECKPOINT} or {NONE}."
        ) from error
    return tokenizer.used(replace(tokenizer.usage, chat_template=source, chat_date=today()))
