"""Conversion between a task's text and the token arrays of a batch."""

from collections.abc import Sequence

import numpy as np

from jrl.tasks import Example
from jrl.tasks.answers.extraction import REASONING_TOKENS, opens_reasoning
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer

UNREADABLE = "\ufffd"
"""Stands for a special token inside a completion, so that no verifier takes it for nothing."""

TAIL = 16
"""Tokens at the end of a prompt among which a template opens reasoning."""


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
    """Text of sampled ids. What ended it, in last place, is left out; other special tokens show.

    Those that open or end reasoning are written out: a verifier has to know where it ends.
    """
    sampled = list(map(int, ids))
    if sampled and sampled[-1] in tokenizer.stop_ids:
        sampled.pop()
    spelled = {tokenizer.special_tokens[name]: name for name in _reasoning_tokens(tokenizer)}
    segments: list[str] = []
    run: list[int] = []
    for token in sampled:
        if token in tokenizer.special_ids:
            segments += [tokenizer.decode(run), spelled.get(token, UNREADABLE)]
            run = []
        else:
            run.append(token)
    return "".join([*segments, tokenizer.decode(run)])


def opened_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The mark with which a prompt leaves reasoning open, as some templates end theirs: what a
    policy writes then begins inside it. Empty where there is none."""
    return opens_reasoning(tokenizer.decode_special(list(prompt)[-TAIL:], UNREADABLE))


def _reasoning_tokens(tokenizer: Tokenizer) -> list[str]:
    return [name for name in tokenizer.special_tokens if name in REASONING_TOKENS]


def special_text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """The same with special tokens written out."""
    sampled = list(map(int, ids))
    if sampled and sampled[-1] in tokenizer.stop_ids:
        sampled.pop()
    return tokenizer.decode_special(sampled, UNREADABLE)


def conversation(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text that the network read and wrote in one row, special tokens written out."""
    return tokenizer.decode_special(list(tokens), UNREADABLE)
