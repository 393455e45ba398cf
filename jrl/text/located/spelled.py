"""Special tokens that the texts of a conversation spell: they are data, and stay text.

A mark, a character that occurs nowhere, is inserted between the characters of each before a
template writes the conversation. The special tokens of the template itself have no mark. The marks
are no part of the text: `Tokenizer.located` removes them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jrl.tasks.data.arguments import Arguments
from jrl.tasks.data.conversations import Conversation
from jrl.text.located.tokens import special_pattern

PRIVATE_USE = range(0xE000, 0xF900)
"""Characters that stand for nothing in Unicode."""


@dataclass(frozen=True)
class Marked:
    """A conversation with marks in the special tokens that it spells.

    Attributes:
      conversation: whose texts have the marks.
      mark: a character that they did not have.
      texts: all of them in a row, without the marks.
    """

    conversation: Conversation
    mark: str
    texts: str

    def place(self, text: str, at: int) -> int:
        """Characters before a place of a text with marks, the marks not counted."""
        return at - text.count(self.mark, 0, at)


def marked(conversation: Conversation, special: Mapping[str, int], more: str = "") -> Marked:
    """The conversation with marks.

    Args:
      special: special tokens, by how they are written.
      more: texts that will be written beside it, which do not have the mark either.
    """
    texts: list[str] = [more]
    parts = conversation.turns, conversation.tools, conversation.arguments
    _changed(parts, lambda text: (texts.append(text), text)[1])
    everything = "".join(texts)
    mark = unused(everything)
    turns, tools, arguments = _changed(parts, lambda text: cut_specials(text, special, mark))
    return Marked(Conversation(tuple(turns), tools, arguments), mark, everything)


def cut_specials(text: str, special: Mapping[str, int], mark: str) -> str:
    """The text with the mark between the characters of each special token that it spells."""
    pattern = re.compile(special_pattern(special))
    # Two that overlap are found one after the other.
    while pattern.search(text):
        text = pattern.sub(lambda found: mark.join(found[0]), text)
    return text


def unused(text: str) -> str:
    """A character that the text does not have."""
    used = set(text)
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in used)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all its texts changed; roles stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Arguments):
        return Arguments(
            {change(k): _changed(v, change) for k, v in value.items()}, change(str(value))
        )
    if isinstance(value, Mapping):
        return {
            change(k) if isinstance(k, str) else k: v if k == "role" else _changed(v, change)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(each, change) for each in value]
    return value
