"""Tokens of a text with their places in it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Located:
    """The tokens of a text, and where they stand in it.

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


def special_pattern(tokens: Iterable[str]) -> str:
    """A pattern for any of the special tokens, the longest that fits first; for none, a pattern
    that fits nowhere."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"
