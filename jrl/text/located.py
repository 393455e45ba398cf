"""Tokens of a text with their character spans, and escapes of special tokens that are plain text.

Special tokens spelled in the messages of a conversation are data. An escape, a character that does
not occur in the conversation, is inserted between the characters of each before a template writes
the conversation. The special tokens of the template itself have no escapes. Escapes are not part of
the text: `Tokenizer.encode_special_spans` removes them.
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
    """Ids of the tokens of a text, and ``[tokens]`` the position of the first character of each and
    the position after its last."""

    ids: list[int]
    begins: np.ndarray
    ends: np.ndarray

    def within(self, begin: int, end: int) -> np.ndarray:
        """``[tokens]`` mask of the tokens that have any of these characters.

        A token without width (the first byte of a character, or a blank that the tokenizer adds)
        belongs to the character at its position.
        """
        return (self.begins < end) & (np.maximum(self.ends, self.begins + 1) > begin)

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[int, int, int]]) -> "TokenSpans":
        """Makes spans from the id, the first character and the end of each token."""
        ids = [token for token, _, _ in spans]
        begins, ends = np.array([span[1:] for span in spans], np.int64).reshape(-1, 2).T
        return cls(ids, begins, ends)

    @classmethod
    def concatenate(cls, segments: Sequence["TokenSpans"], sizes: Sequence[int]) -> "TokenSpans":
        """Concatenates the tokens of consecutive texts, which were tokenized separately and have
        these sizes in characters."""
        offset_segments = list(zip(np.cumsum([0, *sizes[:-1]]), segments, strict=True))
        return cls(
            [token for segment in segments for token in segment.ids],
            np.concatenate([offset + segment.begins for offset, segment in offset_segments]),
            np.concatenate([offset + segment.ends for offset, segment in offset_segments]),
        )


def special_pattern(tokens: Iterable[str]) -> str:
    """A pattern for any of the special tokens, the longest match first; without tokens, a pattern
    that never matches."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"


SPAN_BEGIN, SPAN_END = "\ufdd0", "\ufdd1"
"""Temporary delimiters in a text; they are noncharacters, which texts do not contain."""


def check_no_delimiters(text: str) -> None:
    """Rejects a text that contains `SPAN_BEGIN` or `SPAN_END`."""
    if SPAN_BEGIN in text or SPAN_END in text:
        raise ValueError("it has U+FDD0 or U+FDD1, which are no characters: leave them out")


PRIVATE_USE = range(0xE000, 0xF900)
"""Private-use characters; Unicode gives them no meaning."""


@dataclass(frozen=True)
class EscapedConversation:
    """A conversation with escapes in the special tokens that its texts spell.

    Attributes:
      conversation: with escapes in its texts.
      escape: a character that its texts did not contain.
      texts: the concatenation of all texts, without escapes.
    """

    conversation: Conversation
    escape: str
    texts: str

    def unescaped_offset(self, text: str, offset: int) -> int:
        """Number of characters before an offset of a text with escapes, without the escapes."""
        return offset - text.count(self.escape, 0, offset)


def escape_special_tokens(
    conversation: Conversation, special: Mapping[str, int], more: str = ""
) -> EscapedConversation:
    """Escapes the special tokens in the texts of a conversation.

    Args:
      special: ids of special tokens by their spelling.
      more: other texts that must not contain the escape either.
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
    """Inserts the escape between the characters of each special token that a text spells."""
    pattern = re.compile(special_pattern(special))
    # Repeated, as overlapping tokens are found one after the other.
    while pattern.search(text):
        text = pattern.sub(lambda match: escape.join(match[0]), text)
    return text


def unused_character(text: str) -> str:
    """A character that does not occur in the text."""
    used = set(text)
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in used)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with a function applied to all texts but roles."""
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
