"""Between a task's text and the token arrays of a batch."""

from collections.abc import Sequence

import numpy as np

from jrl.tasks import Example
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer

UNREADABLE = "\ufffd"
"""Stands for a special token inside a completion, so that no verifier takes it for nothing."""


def encode_prompt(format: PromptFormat, example: Example, prompt_length: int) -> list[int]:
    """The ids of a prompt.

    Raises:
      ValueError: for a prompt longer than the prompt length, and as for `PromptFormat.encode`.
    """
    ids = format.encode(example)
    if len(ids) > prompt_length:
        raise ValueError(
            f"the prompt {example.prompt[:60]!r} has {len(ids)} tokens and "
            f"prompt_length={prompt_length}: raise --prompt-length."
        )
    return ids


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Text of sampled ids. What ended it, in last place, is left out; other special tokens show."""
    written = list(map(int, ids))
    if written and written[-1] in tokenizer.stop_ids:
        written.pop()
    runs: list[list[int]] = [[]]
    for token in written:
        if token in tokenizer.special_ids:
            runs.append([])
        else:
            runs[-1].append(token)
    return UNREADABLE.join(map(tokenizer.decode, runs))


def special_text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """The same with special tokens written out."""
    written = list(map(int, ids))
    if written and written[-1] in tokenizer.stop_ids:
        written.pop()
    return tokenizer.decode_special(written, UNREADABLE)


def conversation(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """What the network read and wrote in one row, special tokens written out."""
    return tokenizer.decode_special(list(tokens), UNREADABLE)
