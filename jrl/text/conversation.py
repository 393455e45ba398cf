"""Conversations as tokens: what stands between two turns of the policy, and gold ones to imitate.

With a chat template the messages are laid out as it lays them out; without one their contents
follow each other as they are. What the policy sampled is never encoded again.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jrl.tasks import Example
from jrl.tasks.data.conversations import Conversation
from jrl.text.prompt_format import PromptFormat
from jrl.text.prompts import encode_prompt, special_text_of, text_of

Messages = Sequence[tuple[str, str]]
"""Role and content of each."""


def message_of(format: PromptFormat, ids: np.ndarray) -> str:
    """What the policy said in a turn, its end left out.

    With a template, special tokens are written out: a call of a tool may be made of them.
    """
    if format.template is None:
        return text_of(format.tokenizer, ids)
    return special_text_of(format.tokenizer, ids)


def answer_ids(
    format: PromptFormat, example: Example, before: Messages, after: Messages
) -> list[int]:
    """The tokens between a turn of the policy, which a stop token ended, and its next.

    Args:
      before: messages after the prompt, that turn the last.
      after: what answers it.

    Raises:
      ValueError: for what template or tokenizer refuse.
    """
    if format.template is None:
        return format.tokenizer.encode("".join(content for _, content in after))
    asked = format.conversation(example)
    turns = (*asked.turns, *Conversation.of(before).turns)
    return format.template.answer(replace(asked, turns=turns), Conversation.of(after).turns)


def gold_conversation(format: PromptFormat, example: Example) -> tuple[list[int], list[bool]]:
    """The tokens of a gold conversation after the prompt, and which of them are imitated: those of
    the policy's turns with their ends."""
    ids: list[int] = []
    imitated: list[bool] = []
    turns = example.turns or (("assistant", example.answer),)
    place = 0
    while place < len(turns):
        role, content = turns[place]
        if role == "assistant":
            new = _turn_ids(format, example, turns[:place], content)
            place += 1
        else:
            end = next(n for n in range(place, len(turns)) if turns[n][0] == "assistant")
            new = answer_ids(format, example, turns[:place], turns[place:end])
            place = end
        ids += new
        imitated += [role == "assistant"] * len(new)
    return ids, imitated


def _turn_ids(format: PromptFormat, example: Example, before: Messages, content: str) -> list[int]:
    """The tokens of a turn of the policy with its end.

    Args:
      before: messages after the prompt.
    """
    tokenizer = format.tokenizer
    if format.template is None:
        text = before[-1][1] if before else example.prompt
        return [*tokenizer.continued(text, content), tokenizer.eos_id]
    asked = format.conversation(example)
    turns = (*asked.turns, *Conversation.of(before).turns)
    ids = format.template.continued(replace(asked, turns=turns), content)
    return [*ids, tokenizer.turn_end_id]


def gold_rows(
    format: PromptFormat, examples: Sequence[Example], prompt_length: int, response_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts and gold conversations, padded before and behind, ``[examples, prompt_length +
    response_length]``: ids, what is not padding, and what is imitated.

    Raises:
      ValueError: for a prompt or a conversation that is longer.
    """
    shape = (len(examples), prompt_length + response_length)
    tokens = np.full(shape, format.tokenizer.pad_id, np.int32)
    valid, mask = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, example in enumerate(examples):
        prompt = encode_prompt(format, example, prompt_length)
        ids, imitated = gold_conversation(format, example)
        if len(ids) > response_length:
            what = f"the answer {example.answer[:60]!r}"
            if example.turns:
                what = f"the conversation after {example.prompt[:60]!r}"
            raise ValueError(
                f"{what} has {len(ids)} tokens and "
                f"response_length={response_length}: raise --response-length."
            )
        begin, end = prompt_length - len(prompt), prompt_length + len(ids)
        tokens[row, begin:end], valid[row, begin:end] = [*prompt, *ids], True
        mask[row, prompt_length:end] = imitated
    return tokens, valid, mask
