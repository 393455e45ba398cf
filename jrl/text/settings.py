"""Settings of the text of a prompt: tokenizer, chat template and system prompt."""

from dataclasses import dataclass
from typing import Any

from jrl.setting import setting
from jrl.tasks.data.conversations import template_arguments


@dataclass(frozen=True)
class FormatSettings:
    """Tokenizer, chat template and system prompt."""

    tokenizer: str | None = None
    """A SentencePiece .model file, or a tokenizer.json with its tokenizer_config.json in the same
    folder; None takes the checkpoint's, or trains a character model on the task's characters."""
    chat_template: str = setting(
        "checkpoint",
        sft='Chat template for conversations: "checkpoint" is the one that comes with the '
        'tokenizer, if there is one; "none" uses none; "hermes", "llama3" and "mistral" come with '
        "the library and write tools; anything else is the path of a Jinja file.",
    )
    """Chat template for prompts: "checkpoint" is the one that comes with the tokenizer, if there is
    one; "none" leaves prompts as they are; "hermes", "llama3" and "mistral" come with the library
    and write tools; anything else is the path of a Jinja file."""
    system_prompt: str | None = None
    """First message of every conversation that has no system message."""
    chat_template_kwargs: str | None = None
    """A JSON object of variables for the chat template, for example {"enable_thinking": false}; a
    record's "chat_template_kwargs" take precedence."""

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template in addition to the messages."""
        return template_arguments(self.chat_template_kwargs)

    def __post_init__(self):
        _ = self.template_arguments
