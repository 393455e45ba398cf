"""Tokens of a text with their character offsets."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenSpans:
    """The tokens of a text with their spans of characters in it.

    Attributes:
      ids: of the tokens.
      begins, ends: ``[tokens]`` the characters of each: its first, and the one behind its last.
    """

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
    def concatenate(cls, segments: Sequence["TokenSpans"], sizes: Sequence[int]) -> "TokenSpans":
        """The tokens of texts that follow each other, each of which was read alone.

        Args:
          sizes: characters of each text.
        """
        offsets = np.cumsum([0, *sizes[:-1]])
        return cls(
            [token for segment in segments for token in segment.ids],
            np.concatenate(
                [segment.begins + n for segment, n in zip(segments, offsets, strict=True)]
            ),
            np.concatenate(
                [segment.ends + n for segment, n in zip(segments, offsets, strict=True)]
            ),
        )


def special_pattern(tokens: Iterable[str]) -> str:
    """A pattern for any of the special tokens, the longest that fits first; for none, a pattern
    that fits nowhere."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"
