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


def with_turn_end(tokenizer: Tokenizer, place: str | None = None) -> Tokenizer:
    """The tokenizer, knowing what its chat template ends a turn with; as it is where it has no
    template, or one that ends turns with no token or cannot be used.

    Args:
      place: the file of the template, where it is one that will be used.

    Raises:
      TemplateLimit: where it will be used, and takes too much time or memory.
    """
    usage = tokenizer.usage
    if usage.chat_template is None or find_spec("jinja2") is None:
        return tokenizer
    try:
        found = _turn_end(ChatTemplate(tokenizer, place), tokenizer)
    except ValueError as error:  # said where it is used, which it need not be
        if isinstance(error, TemplateLimit) and place is not None:
            raise  # now, as to find it out once more takes as long
        return tokenizer
    return tokenizer if found == usage.turn_end else tokenizer.used(replace(usage, turn_end=found))


def _turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    closing = template.closing
    if closing is None:
        return None
    tokens = tokenizer.spelled_tokens
    found = re.search(special_pattern(tokens), closing)
    # Some templates go on to the next turn whether they are asked to or not.
    if found is None or found[0] in template.opening(Conversation.from_pairs([("user", "?")])):
        return None
    return tokens[found[0]]
