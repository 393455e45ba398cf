"""Tokenizer of a `tokenizer.json` for texts that spell special tokens as plain text."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from jrl.text.located.tokens import TokenSpans, special_pattern

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around the numbers that stand for special tokens; no text has them, they are no characters."""


class EscapedTextTokenizer:
    """Encodes a text in which the special tokens that are meant are written as they are, and those
    that are text are escaped (`jrl.text.located.escape`).

    The pipeline gets another name for each special token, which the text has in its place, and
    leaves the name that the text spells to the model: everything else is read as it always is, so
    that a text without escapes has the same tokens.

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
        self._names = {text: f"{OPEN}{index}{CLOSE}" for index, text in enumerate(special)}
        added_by_text = {token["content"]: token for token in added}
        options = ("single_word", "lstrip", "rstrip", "normalized")
        self._pipeline.add_tokens(
            [
                tokenizers.AddedToken(
                    name,
                    **{
                        option: added_by_text[text][option]
                        for option in options
                        if text in added_by_text
                    },
                )
                for text, name in self._names.items()
            ]
        )
        self._special_ids = {
            self._pipeline.token_to_id(name): special[text] for text, name in self._names.items()
        }

    def encode_spans(self, text: str, escape: str) -> TokenSpans:
        """The tokens, and their offsets in the text without escapes.

        Raises:
          ValueError: where the model has a special token for what is spelled.
        """
        if OPEN in text or CLOSE in text:
            raise ValueError("it has U+FDD0 or U+FDD1, which are no characters: leave them out")
        segments, widths = list[str](), list[int]()
        for segment in re.split(f"({special_pattern(self._special)})", text):
            name = self._names.get(segment)
            if name is None:
                segment = segment.replace(escape, "")
                segments.append(segment)
                widths += [1] * len(segment)
            else:
                segments.append(name)
                # The first character of the name has the width of the token.
                widths += [len(segment), *[0] * (len(name) - 1)]
        offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
        encoding = self._pipeline.encode("".join(segments), add_special_tokens=False)
        spelled = set(encoding.ids) & set(self._special.values())
        if spelled:
            names = [name for name, token in self._special.items() if token in spelled]
            raise ValueError(
                f"a message spells the special token {names[0]!r}, which the tokenizer cannot "
                "write as text: leave it out"
            )
        ids = [self._special_ids.get(token, token) for token in encoding.ids]
        spans = offsets[np.array(encoding.offsets, np.int64).reshape(-1, 2)]
        return TokenSpans(ids, spans[:, 0], spans[:, 1])
