"""Tokens of a text with their spans of characters, and special tokens that are plain text in it.

Special tokens that the texts of a conversation spell are data. An escape, a character that occurs
nowhere, is inserted between the characters of each before a template writes the conversation. The
special tokens of the template itself have none. Escapes are no part of the text:
`Tokenizer.encode_special_spans` removes them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jrl.tasks.data.conversations import Conversation
from jrl.tasks.tools.calls import Arguments


@dataclass(frozen=True)
class TokenSpans:
    """Ids of the tokens of a text, and ``[tokens]`` the first character of each in it and the one
    behind its last."""

    ids: list[int]
    begins: np.ndarray
    ends: np.ndarray

    def within(self, begin: int, end: int) -> np.ndarray:
        """``[tokens]`` bool: which tokens have any of these characters.

        One without width, the first byte of a character or a blank that the tokenizer adds, is of
        the character where it stands.
        """
        return (self.begins < end) & (np.maximum(self.ends, self.begins + 1) > begin)

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[int, int, int]]) -> "TokenSpans":
        """Tokens from the id, the first character and the one behind the last of each."""
        ids = [token for token, _, _ in spans]
        begins, ends = np.array([span[1:] for span in spans], np.int64).reshape(-1, 2).T
        return cls(ids, begins, ends)

    @classmethod
    def concatenate(cls, segments: Sequence["TokenSpans"], sizes: Sequence[int]) -> "TokenSpans":
        """The tokens of texts that follow each other, each of which was read alone and has a size
        in characters."""
        offset_segments = list(zip(np.cumsum([0, *sizes[:-1]]), segments, strict=True))
        return cls(
            [token for segment in segments for token in segment.ids],
            np.concatenate([offset + segment.begins for offset, segment in offset_segments]),
            np.concatenate([offset + segment.ends for offset, segment in offset_segments]),
        )


def special_pattern(tokens: Iterable[str]) -> str:
    """A pattern for any of the special tokens, the longest that fits first; for none, a pattern
    that fits nowhere."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"


SPAN_BEGIN, SPAN_END = "\ufdd0", "\ufdd1"
"""Marks in a text that is written or read on the way; no text has them, they are no characters."""


def check_no_delimiters(text: str) -> None:
    """Refuses a text that has `SPAN_BEGIN` or `SPAN_END`."""
    if SPAN_BEGIN in text or SPAN_END in text:
        raise ValueError("it has U+FDD0 or U+FDD1, which are no characters: leave them out")


PRIVATE_USE = range(0xE000, 0xF900)
"""Characters that stand for nothing in Unicode."""


@dataclass(frozen=True)
class EscapedConversation:
    """A conversation with escapes in the special tokens that it spells.

    Attributes:
      conversation: whose texts have the escapes.
      escape: a character that they did not have.
      texts: all of them in a row, without the escapes.
    """

    conversation: Conversation
    escape: str
    texts: str

    def unescaped_offset(self, text: str, offset: int) -> int:
        """Characters before an offset of a text with escapes, the escapes not counted."""
        return offset - text.count(self.escape, 0, offset)


def escape_special_tokens(
    conversation: Conversation, special: Mapping[str, int], more: str = ""
) -> EscapedConversation:
    """The conversation with its special tokens escaped.

    Args:
      special: special tokens, by how they are written.
      more: texts that will be written beside it, which do not have the escape either.
    """
    texts: list[str] = [more]
    contents = conversation.turns, conversation.tools, conversation.arguments
    _map_texts(contents, lambda text: (texts.append(text), text)[1])
    all_texts = "".join(texts)
    escape = unused_character(all_texts)
    messages, tools, arguments = _map_texts(
        contents, lambda text: escape_text(text, special, escape)
    )
    return EscapedConversation(Conversation(tuple(messages), tools, arguments), escape, all_texts)


def escape_text(text: str, special: Mapping[str, int], escape: str) -> str:
    """The text with the escape between the characters of each special token that it spells."""
    pattern = re.compile(special_pattern(special))
    # Two that overlap are found one after the other.
    while pattern.search(text):
        text = pattern.sub(lambda match: escape.join(match[0]), text)
    return text


def unused_character(text: str) -> str:
    """A character that the text does not have."""
    used = set(text)
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in used)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all its texts changed; roles stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Arguments):
        return Arguments(
            {change(k): _map_texts(v, change) for k, v in value.items()}, change(str(value))
        )
    if isinstance(value, Mapping):
        return {
            change(k) if isinstance(k, str) else k: v if k == "role" else _map_texts(v, change)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_texts(each, change) for each in value]
    return value
