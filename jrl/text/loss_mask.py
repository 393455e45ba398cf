"""Tokens of a conversation, and the loss mask of the assistant's turns.

With a chat template, the tokens encode the whole text that it writes. Trained on are:

* The assistant's text: between the template's own ``{% generation %}`` tags, else from the text
  before a turn, opened for it, to the text with the turn.
* Each token with a character of it. A token that has characters of the generation prompt as well
  (two line ends, mostly) is split: the policy continues the tokens of the prompt alone.
* The first token that ends a completion, and nothing after it: a policy never samples the line end
  that a template writes there. If only the start of the next turn ends a turn (GLM), the end of
  sequence follows the last turn.

A turn that its record excludes (`jrl.tasks.data.training_fields`) is context, and so is the first
token of a "text".

If there is no template, a question and an answer are the tokens of both and the end of sequence, as
in reinforcement learning. A longer conversation is written with the role before each content:

    user: 2 + 2?
    assistant: 4
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jrl.tasks import Example
from jrl.tasks.data.chats import Chat
from jrl.tasks.data.conversations import Conversation, Turn, content_of
from jrl.tasks.data.training_fields import is_trained
from jrl.text.chat import ChatTemplate, text_or_raise
from jrl.text.located import (
    SPAN_BEGIN,
    SPAN_END,
    TokenSpans,
    check_no_delimiters,
    escape_special_tokens,
)
from jrl.text.prompt_format import NO_TOOLS, PromptFormat, has_calls, reasoning_of
from jrl.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Tokens of a conversation and their loss mask, up to the last token in the mask.

    Attributes:
      ids: ``[time]`` token ids.
      loss_mask: ``[time]`` true on tokens that are trained on; false on the first token.
      context: number of tokens before the first one in the mask.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    context: int

    @property
    def turn_length(self) -> int:
        """Number of tokens of the first turn that is trained on, with its end."""
        others = np.flatnonzero(~self.loss_mask[self.context :])
        return int(others[0]) if len(others) else len(self.ids) - self.context

    def truncate(self, most: int) -> "Encoded | None":
        """Its first tokens; None if none of them is in the loss mask."""
        loss_mask = self.loss_mask[:most]
        return Encoded(self.ids[:most], loss_mask, self.context) if loss_mask.any() else None


@dataclass(frozen=True)
class ChatFormat(PromptFormat):
    """Prompts of conversations by their own tokens; all others as in `PromptFormat`.

    Attributes:
      last: whether only the last turn of the assistant is trained on.
    """

    last: bool = False

    def encode(self, example: Example) -> list[int]:
        if not isinstance(example, Chat):
            return super().encode(example)
        encoded = encode_chat(self, example, last=self.last)
        return encoded.ids[: encoded.context].tolist()


Tokens = tuple[list[int], np.ndarray, int]
"""Ids of a whole conversation, ``[time]`` index of the span of each token among those that are
trained on, from 0, or -1 outside of them, and the number of these spans."""
Spans = list[tuple[int, int]]
"""Begin and end of each span of a text that is trained on."""


def encode_chat(format: PromptFormat, chat: Chat, *, last: bool = False) -> Encoded:
    """The tokens of a conversation; with `last`, only the assistant's last turn is trained on.

    Raises:
      ValueError: naming the record, if the template rejects it, or writes the first messages
        differently alone than at the start of the whole conversation.
    """
    try:
        if chat.text is not None:
            return _encode_text(format.tokenizer, chat.text)
        if format.template is None:
            tokens = _encode_without_template(format, chat, last)
        else:
            tokens = _encode_with_template(format, format.template, chat, last)
        return _build_loss_mask(tokens, format.tokenizer)
    except ValueError as error:
        raise ValueError(f"{chat.location}: {error}") from error


def _trained_turns(messages: Sequence[Turn], last: bool) -> list[int]:
    """Indices of the messages that are trained on."""
    turns = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    return [index for index in turns[-1 if last else 0 :] if is_trained(messages[index])]


def _build_loss_mask(tokens: Tokens, tokenizer: Tokenizer) -> Encoded:
    """Builds the loss mask: the tokens of each turn up to its end, and an added end after the last
    turn if it has none.

    Raises:
      ValueError: if nothing of a turn but its end is trained on.
    """
    ids, turn, num_turns = tokens
    loss_mask = np.zeros(len(ids), bool)
    for turn_index in range(num_turns):
        positions = np.flatnonzero(turn == turn_index)
        ends = [position for position in positions if ids[position] in tokenizer.stop_ids]
        if len(positions) == 0 or positions[0] in ends:
            raise ValueError(
                "the chat template writes nothing of one of the assistant's turns but its end, so "
                "that it would learn to end the turn at once: leave the record out, or give a "
                "template that writes all of its fields as --chat-template FILE"
            )
        next_position = positions[-1] + 1
        if not ends and next_position < len(ids) and ids[next_position] in tokenizer.stop_ids:
            # The token that ends a turn may come after the template's tag.
            positions, ends = np.append(positions, next_position), [next_position]
        loss_mask[positions[positions <= ends[0]] if ends else positions] = True
    # The first token has no context, so it is not predicted.
    loss_mask[:1] = False
    if not loss_mask.any():
        raise ValueError("its only token has nothing before it: leave the record out")
    trained = np.flatnonzero(loss_mask)
    end, context = trained[-1] + 1, int(trained[0])
    if ids[end - 1] not in tokenizer.stop_ids:
        ids, loss_mask = [*ids[:end], tokenizer.turn_end_id], np.append(loss_mask[:end], True)
        end += 1
    return Encoded(np.array(ids[:end], np.int32), loss_mask[:end], context)


def _encode_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """A text that is trained on from its second token: the first has no context."""
    ids = tokenizer.with_prefix(tokenizer.encode_special(text))
    if ids[-1] not in tokenizer.stop_ids:
        ids = [*ids, tokenizer.eos_id]
    if len(ids) < 2:
        raise ValueError("its text has one token, which nothing predicts: leave the record out")
    return Encoded(np.array(ids, np.int32), np.arange(len(ids)) > 0, 1)


def _encode_without_template(format: PromptFormat, chat: Chat, last: bool) -> Tokens:
    """Tokens of a conversation if there is no template."""
    tokenizer, messages = format.tokenizer, chat.conversation.turns
    if chat.conversation.tools is not None or any(map(has_calls, messages)):
        raise ValueError(f"it {NO_TOOLS}")
    trained = _trained_turns(messages, last)
    if names := [name for index in trained for name in reasoning_of(messages[index])]:
        raise ValueError(
            f"it has {names[0]}, and the model no chat template to write it with: give "
            "--chat-template FILE, or leave the field out"
        )
    if chat.is_pair:
        question, answer = map(content_of, messages)
        before = tokenizer.with_prefix(tokenizer.encode(question))
        after = [*tokenizer.encode_continuation(question, answer), tokenizer.eos_id]
        return [*before, *after], np.repeat([-1, 0], [len(before), len(after)]), 1
    ids, turn = list(tokenizer.prefix), [np.full(len(tokenizer.prefix), -1)]
    unencoded = ""
    for index, each in enumerate(messages):
        unencoded += ("\n" if index else "") + each["role"] + ": "
        if each["role"] != "assistant":
            unencoded += content_of(each)
            continue
        # The text between two end tokens is tokenized at once.
        encoding = tokenizer.encode_spans(unencoded + content_of(each))
        ids += [*encoding.ids, tokenizer.eos_id]
        in_turn = encoding.within(len(unencoded), len(unencoded) + len(content_of(each)))
        turn_index = trained.index(index) if index in trained else -1
        turn += [np.where(in_turn, turn_index, -1), np.array([turn_index])]
        unencoded = ""
    return ids, np.concatenate(turn), len(trained)


def _encode_with_template(
    format: PromptFormat, template: ChatTemplate, chat: Chat, last: bool
) -> Tokens:
    """Tokens of a conversation by a template. A special token spelled in a message is text, as in
    prompts (`jrl.text.chat.ChatTemplate`)."""
    tokenizer = format.tokenizer
    conversation = format.add_defaults(chat.conversation)
    trained = _trained_turns(conversation.turns, last)
    format.check_shown(chat)
    format.written_fields.check(conversation, trained)
    escaped = escape_special_tokens(conversation, tokenizer.special_tokens)
    located = None
    if template.has_generation_tags:
        check_no_delimiters(escaped.texts)
        located = _locate_tagged_text(template, escaped.conversation, trained)
    text, spans = located or _locate_assistant_text(template, escaped.conversation, trained)
    offsets = [
        (escaped.unescaped_offset(text, begin), escaped.unescaped_offset(text, end))
        for begin, end in spans
    ]
    encoding = tokenizer.encode_special_spans(text, escaped.escape)
    special = _mask_special_tokens(tokenizer, encoding)
    straddled = [
        begin
        for (begin, _), (offset, _) in zip(spans, offsets, strict=True)
        if np.any((encoding.begins < offset) & (offset < encoding.ends) & ~special)
    ]
    if straddled:
        # The policy continues the tokens of the prompt alone.
        segments = [text[a:b] for a, b in pairwise([0, *straddled, len(text)])]
        encoding = TokenSpans.concatenate(
            [tokenizer.encode_special_spans(segment, escaped.escape) for segment in segments],
            [len(segment) - segment.count(escaped.escape) for segment in segments],
        )
        special = _mask_special_tokens(tokenizer, encoding)
    turn = np.full(len(encoding.ids), -1)
    for turn_index, (begin, end) in enumerate(offsets):
        # Some special tokens include the blanks after them; these are not sampled.
        turn[encoding.within(begin, end) & ~(special & (encoding.begins < begin))] = turn_index
    ids = tokenizer.with_template_prefix(encoding.ids)
    return ids, np.concatenate([np.full(len(ids) - len(turn), -1), turn]), len(spans)


def _mask_special_tokens(tokenizer: Tokenizer, encoding: TokenSpans) -> np.ndarray:
    """``[tokens]`` mask of special tokens."""
    return np.isin(encoding.ids, list(tokenizer.special_ids))


def _locate_tagged_text(
    template: ChatTemplate, conversation: Conversation, trained: Sequence[int]
) -> tuple[str, Spans] | None:
    """The text that the template writes, without its tags, and the spans between them that are
    trained on. None if they cannot be told by the tags: it writes none around these messages, or
    several around a turn, and not all turns are trained on."""
    text, *others = template.write(conversation, tagged=True).split(SPAN_BEGIN)
    spans: Spans = []
    for other in others:
        span_text, _, after = other.partition(SPAN_END)
        spans.append((len(text), len(text) + len(span_text)))
        text += span_text + after
    messages = conversation.turns
    turns = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    if len(spans) == len(turns):
        spans = [span for index, span in zip(turns, spans, strict=True) if index in trained]
    elif not spans or len(trained) < len(turns):
        return None
    elif len(spans) < len(turns):
        raise ValueError(
            f"the chat template writes {{% generation %}} tags around {len(spans)} of the "
            f"assistant's {len(turns)} turns: give a template with tags around all of them as "
            "--chat-template, or --learn last"
        )
    else:
        # A part of a turn may be empty.
        spans = [(begin, end) for begin, end in spans if begin < end]
    opened = template.generation_prompt(replace(conversation, turns=messages[: turns[-1]]))
    # A tag may include the text with which the template opens the turn.
    return text, [
        (begin + len(opened) if text.startswith(opened, begin) else begin, end)
        for begin, end in spans
    ]


def _locate_assistant_text(
    template: ChatTemplate, conversation: Conversation, trained: Sequence[int]
) -> tuple[str, Spans]:
    """The text that the template writes, and the spans of the messages in it that are trained on:
    each from the text before the turn to the text including it."""
    messages = conversation.turns
    requests = [(conversation, False)]
    for index in trained:
        requests.append((replace(conversation, turns=messages[:index]), True))
        if index + 1 < len(messages):
            requests.append((replace(conversation, turns=messages[: index + 1]), False))
    texts = iter(template.write_all(requests))
    full_text, spans, end = text_or_raise(next(texts)), Spans(), 0
    for index in trained:
        before = text_or_raise(next(texts))
        after = full_text if index + 1 == len(messages) else text_or_raise(next(texts))
        turn_suffix = template.turn_suffix
        if not full_text.startswith(after) and turn_suffix and after.endswith(turn_suffix):
            # Some templates end the last message differently from earlier ones.
            after = after.removesuffix(turn_suffix)
        if not (full_text.startswith(after) and after.startswith(before) and len(before) >= end):
            raise ValueError(
                f"the chat template writes the first {index + 1} messages differently than at the "
                "start of the full conversation, so that the assistant's tokens cannot be "
                "located: give --learn last, or a template with {% generation %} tags as "
                "--chat-template"
            )
        spans.append((len(before), len(after)))
        end = len(after)
    return full_text, spans
