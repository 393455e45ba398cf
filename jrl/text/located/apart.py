"""Tokenizer of a `tokenizer.json` for texts that spell special tokens as plain text."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from jrl.text.located.tokens import Located, special_pattern

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around the numbers that stand for special tokens; no text has them, they are no characters."""


class SpelledApart:
    """Reads a text in which the special tokens that are meant stand as they are, and those that
    are text have marks between their characters.

    The pipeline gets another name for each special token, which the text has in its place, and
    leaves the name that the text spells to the model: everything else is read as it always is, so
    that a text without marks has the same tokens.

    Args:
      pipeline: what tokenizer.json holds.
      special: the special tokens, by how they are written.
    """

    def __init__(self, pipeline: Mapping[str, Any], special: Mapping[str, int]):
        added = [
            {**token, "special": token["special"] or token["content"] in special}
            for token in pipeline.get("added_tokens") or ()
        ]
        changed = {**pipeline, "added_tokens": added, "post_processor": None}
        self._pipeline = tokenizers.Tokenizer.from_str(json.dumps(changed))
        self._pipeline.no_truncation()
        self._pipeline.no_padding()
        self._pipeline.encode_special_tokens = True
        self._special = special
        self._names = {text: f"{OPEN}{number}{CLOSE}" for number, text in enumerate(special)}
        known = {token["content"]: token for token in added}
        ways = ("single_word", "lstrip", "rstrip", "normalized")
        self._pipeline.add_tokens(
            [
                tokenizers.AddedToken(
                    name, **{way: known[text][way] for way in ways if text in known}
                )
                for text, name in self._names.items()
            ]
        )
        self._meant = {
            self._pipeline.token_to_id(name): special[text] for text, name in self._names.items()
        }

    def located(self, text: str, mark: str) -> Located:
        """The tokens, and their places in the text without marks.

        Raises:
          ValueError: where the model has a special token for what is spelled.
        """
        if OPEN in text or CLOSE in text:
            raise ValueError("it has U+FDD0 or U+FDD1, which are no characters: leave them out")
        parts, widths = list[str](), list[int]()
        for part in re.split(f"({special_pattern(self._special)})", text):
            name = self._names.get(part)
            if name is None:
                part = part.replace(mark, "")
                parts.append(part)
                widths += [1] * len(part)
            else:
                parts.append(name)
                # The first character of the name has the width of the token.
                widths += [len(part), *[0] * (len(name) - 1)]
        place = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
        found = self._pipeline.encode("".join(parts), add_special_tokens=False)
        spelled = set(found.ids) & set(self._special.values())
        if spelled:
            names = [name for name, token in self._special.items() if token in spelled]
            raise ValueError(
                f"a message spells the special token {names[0]!r}, which the tokenizer cannot "
                "write as text: leave it out"
            )
        ids = [self._meant.get(token, token) for token in found.ids]
        places = place[np.array(found.offsets, np.int64).reshape(-1, 2)]
        return Located(ids, places[:, 0], places[:, 1])
