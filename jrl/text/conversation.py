"""Tokens of conversations: between two turns of the policy, and of reference conversations.

With a chat template, messages are written as the template writes them; without one, their contents
are concatenated as they are. The tokens that the policy sampled are never encoded again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jrl.tasks import Example
from jrl.tasks.data.conversations import Conversation, Turn
from jrl.tasks.tools.calls import format_message_calls
from jrl.tasks.tools.formats.detection import PLAIN
from jrl.text.prompt_format import PromptFormat, example_tools
from jrl.text.prompts import encode_prompt, opened_reasoning, special_text_of, text_of
from jrl.text.tool_calls import calls_of, with_calls

Messages = Sequence[tuple[str, str]]
"""Role and content of each."""


def message_of(format: PromptFormat, ids: np.ndarray, before: Sequence[int] = ()) -> str:
    """Text of the policy's turn, without its end.

    With a template, special tokens are written out: a tool call may be made of them. If the tokens
    before the turn have opened reasoning, the text starts with the mark of that.

    Args:
      before: the tokens that the turn continues.
    """
    if format.template is None:
        return text_of(format.tokenizer, ids)
    opened = opened_reasoning(format.tokenizer, before)
    return opened + special_text_of(format.tokenizer, ids)


def environment_messages(
    format: PromptFormat, example: Example, said: Sequence[str], cut: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """The policy's messages as its environment is given them: with the calls of tools in the format
    of the checkpoint, and "truncated" where the limit of a turn cut one.

    Args:
      said: the texts of its turns.
      cut: numbers of those that were cut.
    """
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": text} for text in said]
    known = example_tools(example)
    # Without a format the environment looks for calls itself.
    if format.tool_format is not None and known:
        calls_of_turns = calls_of(format.tool_format, known, said)
        for message, (calls, ids) in zip(messages, calls_of_turns, strict=True):
            message["tool_calls"] = format_message_calls(calls, ids)
    for number in cut:
        messages[number]["truncated"] = True
    return messages


def answer_ids(
    format: PromptFormat,
    example: Example,
    before: Messages,
    after: Messages,
    *,
    ended: bool = True,
) -> list[int]:
    """The tokens between a turn of the policy and its next.

    Args:
      before: messages after the prompt, that turn the last.
      after: what answers it.
      ended: whether a stop token ended the turn; else one comes first.

    Raises:
      ValueError: for what template or tokenizer refuse.
    """
    if format.template is None:
        ids = format.tokenizer.encode("".join(content for _, content in after))
        return ids if ended else [format.tokenizer.eos_id, *ids]
    asked = format.conversation(example)
    turns = _turns(format, example, (*before, *after))
    told = replace(asked, turns=(*asked.turns, *turns[: len(before)]))
    return format.template.answer(told, turns[len(before) :], ended=ended)


def _turns(format: PromptFormat, example: Example, messages: Messages) -> tuple[Turn, ...]:
    """Messages after a prompt, with the calls of tools that are in them."""
    if format.tool_format is None or not example.tools:
        return Conversation.from_pairs(messages).turns
    return with_calls(format.tool_format, example_tools(example), messages)


def gold_conversation(format: PromptFormat, example: Example) -> tuple[list[int], list[bool]]:
    """The tokens of a reference conversation after the prompt, and their loss mask: true on the
    policy's turns with their ends."""
    ids: list[int] = []
    imitated: list[bool] = []
    turns = _in_format(format, example, example.turns or (("assistant", example.answer),))
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
    told = replace(asked, turns=(*asked.turns, *_turns(format, example, before)))
    calls = format.tool_format and format.tool_format.calls(content, example_tools(example))
    ids = format.template.continued(told, content, special=bool(calls))
    return ids if ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.turn_end_id]


def _in_format(format: PromptFormat, example: Example, turns: Messages) -> Messages:
    """The turns of a reference conversation, whose calls are written plainly, with calls as the
    checkpoint writes them."""
    own, known = format.tool_format, example_tools(example)
    if own is None or not known:
        return turns
    return tuple(
        (role, own.render(calls))
        if role == "assistant" and (calls := PLAIN.calls(content, known))
        else (role, content)
        for role, content in turns
    )


def gold_rows(
    format: PromptFormat, examples: Sequence[Example], prompt_length: int, response_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts and reference conversations, padded left and right, ``[examples, prompt_length +
    response_length]``: ids, padding mask (true on tokens), and loss mask.

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
