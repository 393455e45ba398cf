"""Token with which a chat template ends the assistant's turn, found by rendering one turn.

The config.json of a checkpoint may name another token, as base models do whose template is that of
the chat model. The network is trained on the template's token, which ends a completion as well.
"""

import re
from dataclasses import replace
from importlib.util import find_spec

from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.located.tokens import special_pattern
from jrl.text.templates.renderer import TemplateLimit
from jrl.text.tokenizer import Tokenizer


def with_turn_end(tokenizer: Tokenizer, path: str | None = None) -> Tokenizer:
    """The tokenizer, knowing what its chat template ends a turn with; as it is where it has no
    template, or one that ends turns with no token or cannot be used.

    Args:
      path: the file of the template, where it is one that will be used.

    Raises:
      TemplateLimit: where it will be used, and takes too much time or memory.
    """
    usage = tokenizer.usage
    if usage.chat_template is None or find_spec("jinja2") is None:
        return tokenizer
    try:
        end_id = _find_turn_end(ChatTemplate(tokenizer, path), tokenizer)
    except ValueError as error:  # said where it is used, which it need not be
        if isinstance(error, TemplateLimit) and path is not None:
            raise  # now, as to find it out once more takes as long
        return tokenizer
    return (
        tokenizer
        if end_id == usage.turn_end
        else tokenizer.with_usage(replace(usage, turn_end=end_id))
    )


def _find_turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    turn_suffix = template.turn_suffix
    if turn_suffix is None:
        return None
    tokens = tokenizer.spelled_tokens
    match = re.search(special_pattern(tokens), turn_suffix)
    # Some templates go on to the next turn whether they are asked to or not.
    if match is None or match[0] in template.generation_prompt(
        Conversation.from_pairs([("user", "?")])
    ):
        return None
    return tokens[match[0]]
