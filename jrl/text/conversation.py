"""Tokens of conversations: between two turns of the policy, and of reference conversations.

With a chat template, messages are written by the template; if there is none, their contents are
concatenated. The tokens that the policy sampled are never encoded again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jrl.tasks import Example
from jrl.tasks.data.conversations import Conversation, Turn
from jrl.tasks.tools.calls import format_message_calls
from jrl.tasks.tools.detection import PLAIN
from jrl.text.prompt_format import (
    PromptFormat,
    encode_prompt,
    example_tools,
    opened_reasoning,
    special_text_of,
    text_of,
)
from jrl.text.tool_calls import attach_calls, parse_calls

Messages = Sequence[tuple[str, str]]
"""Role and content of each message."""


def message_of(format: PromptFormat, ids: np.ndarray, before: Sequence[int] = ()) -> str:
    """Text of the policy's turn, without its end.

    With a template, special tokens are written out, as tool calls may consist of them. If the
    tokens before the turn have opened reasoning, the text starts with its opening mark.
    """
    if format.template is None:
        return text_of(format.tokenizer, ids)
    opened = opened_reasoning(format.tokenizer, before)
    return opened + special_text_of(format.tokenizer, ids)


def environment_messages(
    format: PromptFormat, example: Example, texts: Sequence[str], truncated: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """The policy's messages for its environment, from the texts of its turns: with tool calls in
    the format of the checkpoint, and "truncated" in the turns with these indices, which were cut at
    their maximum length.
    """
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": text} for text in texts]
    tools = example_tools(example)
    # If there is no format, the environment detects calls itself.
    if format.tool_format is not None and tools:
        calls_by_message = parse_calls(format.tool_format, tools, texts)
        for message, (calls, ids) in zip(messages, calls_by_message, strict=True):
            message["tool_calls"] = format_message_calls(calls, ids)
    for index in truncated:
        messages[index]["truncated"] = True
    return messages


def answer_ids(
    format: PromptFormat, example: Example, before: Messages, after: Messages, *, ended: bool = True
) -> list[int]:
    """The tokens between a turn of the policy and its next one.

    Args:
      before: messages after the prompt, up to that turn.
      after: messages that reply to it.
      ended: whether a stop token ended the turn; otherwise one is added first.

    Raises:
      ValueError: for messages that the template or the tokenizer rejects.
    """
    if format.template is None:
        ids = format.tokenizer.encode("".join(content for _, content in after))
        return ids if ended else [format.tokenizer.eos_id, *ids]
    conversation = format.conversation(example)
    messages = _with_tool_calls(format, example, (*before, *after))
    history = replace(conversation, turns=(*conversation.turns, *messages[: len(before)]))
    return format.template.answer(history, messages[len(before) :], ended=ended)


def _with_tool_calls(
    format: PromptFormat, example: Example, messages: Messages
) -> tuple[Turn, ...]:
    """Messages after a prompt, with their tool calls as fields."""
    if format.tool_format is None or not example.tools:
        return Conversation.from_pairs(messages).turns
    return attach_calls(format.tool_format, example_tools(example), messages)


def reference_conversation(format: PromptFormat, example: Example) -> tuple[list[int], list[bool]]:
    """The tokens of a reference conversation after the prompt, and their loss mask: true on the
    policy's turns, including the end of each turn."""
    ids, loss_mask, end = list[int](), list[bool](), 0
    messages = _render_calls(format, example, example.turns or (("assistant", example.answer),))
    for index, (role, content) in enumerate(messages):
        if role != "assistant":
            continue
        before, after = messages[:end], messages[end:index]
        between = answer_ids(format, example, before, after) if after else []
        turn = _encode_turn(format, example, messages[:index], content)
        ids += [*between, *turn]
        loss_mask += [False] * len(between) + [True] * len(turn)
        end = index + 1
    return ids, loss_mask


def _encode_turn(
    format: PromptFormat, example: Example, before: Messages, content: str
) -> list[int]:
    """The tokens of a policy's turn with its end, after these messages that follow the prompt."""
    tokenizer = format.tokenizer
    if format.template is None:
        text = before[-1][1] if before else example.prompt
        return [*tokenizer.encode_continuation(text, content), tokenizer.eos_id]
    conversation = format.conversation(example)
    history = replace(
        conversation, turns=(*conversation.turns, *_with_tool_calls(format, example, before))
    )
    calls = format.tool_format and format.tool_format.calls(content, example_tools(example))
    ids = format.template.encode_continuation(history, content, special=bool(calls))
    return ids if ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.turn_end_id]


def _render_calls(format: PromptFormat, example: Example, messages: Messages) -> Messages:
    """A reference conversation with its plain calls rewritten in the checkpoint's format."""
    tool_format, tools = format.tool_format, example_tools(example)
    if tool_format is None or not tools:
        return messages
    return tuple(
        (role, tool_format.render(calls))
        if role == "assistant" and (calls := PLAIN.calls(content, tools))
        else (role, content)
        for role, content in messages
    )


def reference_rows(
    format: PromptFormat, examples: Sequence[Example], prompt_length: int, response_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts and reference conversations, padded left and right, ``[examples, prompt_length +
    response_length]``: ids, padding mask (true on tokens), and loss mask.

    Raises:
      ValueError: for a prompt or a conversation that is too long.
    """
    shape = (len(examples), prompt_length + response_length)
    tokens = np.full(shape, format.tokenizer.pad_id, np.int32)
    valid, mask = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, example in enumerate(examples):
        prompt = encode_prompt(format, example, prompt_length)
        ids, in_loss = reference_conversation(format, example)
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
        mask[row, prompt_length:end] = in_loss
    return tokens, valid, mask
