"""Tokens of a conversation, and the loss mask of the assistant's turns.

With a chat template, the tokens are those of the whole text that it writes. The template's own
``{% generation %}`` tags delimit the assistant's text, if it has them. Otherwise the conversation
is rendered up to each of the assistant's turns, opened for it, and up to the turn's end; the
characters between the two are the assistant's. A token with one of these characters is the
assistant's. If a token would have characters of the generation prompt as well (two line ends,
mostly), the text is split between them: the policy continues the tokens of the prompt alone. A turn
ends with the first token that ends a completion. A policy never samples the text that a template
writes after that (a line end, mostly), and it is not trained on. If only the start of the next turn
ends a turn, as in GLM's template, the end of sequence comes after the last turn. A "text" is
trained on from its second token on.

Without a template, a question and an answer are the tokens of both and the end of sequence, as in
reinforcement learning. A longer conversation is written with the role before each content:

    user: 2 + 2?
    assistant: 4
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jrl.tasks import Example
from jrl.tasks.data.chats import Chat
from jrl.tasks.data.conversations import Conversation, content_of
from jrl.text.chat import ChatTemplate, text_or_raise
from jrl.text.located import (
    SPAN_BEGIN,
    SPAN_END,
    TokenSpans,
    check_no_delimiters,
    escape_special_tokens,
)
from jrl.text.prompt_format import NO_TOOLS, PromptFormat
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


Tokens = tuple[list[int], np.ndarray]
"""Ids of a whole conversation, and ``[time]`` index of the assistant's turn of each token, from 0;
-1 outside of these turns."""


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
            ids, turn = _encode_without_template(format, chat)
        else:
            ids, turn = _encode_with_template(format, format.template, chat, last)
    except ValueError as error:
        raise ValueError(f"{chat.location}: {error}") from error
    encoded = _build_loss_mask(ids, turn, format.tokenizer, last)
    if encoded is None:
        raise ValueError(
            f"{chat.location}: the assistant's turns have no token to train on: leave the record "
            "out"
        )
    return encoded


def _build_loss_mask(
    ids: list[int], turn: np.ndarray, tokenizer: Tokenizer, last: bool
) -> Encoded | None:
    """Builds the loss mask: the tokens of each turn up to its end, and an added end after the last
    turn if it has none; None if no token is trained on."""
    loss_mask = np.zeros(len(ids), bool)
    turn_indices = np.unique(turn[turn >= 0])
    for turn_index in turn_indices[-1:] if last else turn_indices:
        positions = np.flatnonzero(turn == turn_index)
        ends = [position for position in positions if ids[position] in tokenizer.stop_ids]
        next_position = positions[-1] + 1
        if not ends and next_position < len(ids) and ids[next_position] in tokenizer.stop_ids:
            # The token that ends a turn may come after the template's tag.
            positions, ends = np.append(positions, next_position), [next_position]
        loss_mask[positions[positions <= ends[0]] if ends else positions] = True
    # The first token has no context, so it is not predicted.
    loss_mask[:1] = False
    if not loss_mask.any():
        return None
    trained = np.flatnonzero(loss_mask)
    end, context = trained[-1] + 1, int(trained[0])
    if ids[end - 1] not in tokenizer.stop_ids:
        ids, loss_mask = [*ids[:end], tokenizer.turn_end_id], np.append(loss_mask[:end], True)
        end += 1
    return Encoded(np.array(ids[:end], np.int32), loss_mask[:end], context)


def _encode_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """A text that is trained on except for its first token, which has no context."""
    ids = tokenizer.with_prefix(tokenizer.encode_special(text))
    if ids[-1] not in tokenizer.stop_ids:
        ids = [*ids, tokenizer.eos_id]
    if len(ids) < 2:
        raise ValueError("its text has one token, which nothing predicts: leave the record out")
    return Encoded(np.array(ids, np.int32), np.arange(len(ids)) > 0, 1)


def _encode_without_template(format: PromptFormat, chat: Chat) -> Tokens:
    """Tokens of a conversation without a template."""
    tokenizer, messages = format.tokenizer, chat.conversation.turns
    if any(turn.get("tool_calls") for turn in messages) or chat.conversation.tools is not None:
        raise ValueError(f"it {NO_TOOLS}")
    if chat.is_pair:
        question, answer = map(content_of, messages)
        before = tokenizer.with_prefix(tokenizer.encode(question))
        after = [*tokenizer.encode_continuation(question, answer), tokenizer.eos_id]
        return [*before, *after], np.repeat([-1, 0], [len(before), len(after)])
    ids, turn = list(tokenizer.prefix), [np.full(len(tokenizer.prefix), -1)]
    unencoded, turn_index = "", 0
    for index, each in enumerate(messages):
        unencoded += ("\n" if index else "") + each["role"] + ": "
        if each["role"] != "assistant":
            unencoded += content_of(each)
            continue
        # The text between two end tokens is tokenized at once.
        encoding = tokenizer.encode_spans(unencoded + content_of(each))
        ids += [*encoding.ids, tokenizer.eos_id]
        in_turn = encoding.within(len(unencoded), len(unencoded) + len(content_of(each)))
        turn += [np.where(in_turn, turn_index, -1), np.array([turn_index])]
        unencoded, turn_index = "", turn_index + 1
    return ids, np.concatenate(turn)


def _encode_with_template(
    format: PromptFormat, template: ChatTemplate, chat: Chat, last: bool
) -> Tokens:
    """Tokens of a conversation by a template. A special token spelled in a message is text, as in
    prompts (`jrl.text.chat.ChatTemplate`)."""
    tokenizer = format.tokenizer
    format.check_shown(chat)
    escaped = escape_special_tokens(
        format.add_defaults(chat.conversation), tokenizer.special_tokens
    )
    if template.has_generation_tags:
        check_no_delimiters(escaped.texts)
        text, spans = _locate_tagged_text(template, escaped.conversation)
    else:
        text, spans = _locate_assistant_text(template, escaped.conversation, last)
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
        # Some special tokens include the blanks after them, which are not sampled.
        turn[encoding.within(begin, end) & ~(special & (encoding.begins < begin))] = turn_index
    ids = tokenizer.with_template_prefix(encoding.ids)
    return ids, np.concatenate([np.full(len(ids) - len(turn), -1), turn])


def _mask_special_tokens(tokenizer: Tokenizer, encoding: TokenSpans) -> np.ndarray:
    """``[tokens]`` mask of special tokens."""
    return np.isin(encoding.ids, list(tokenizer.special_ids))


def _locate_tagged_text(
    template: ChatTemplate, conversation: Conversation
) -> tuple[str, list[tuple[int, int]]]:
    """The text that the template writes, without its tags, and the spans between them."""
    text, *others = template.write(conversation, tagged=True).split(SPAN_BEGIN)
    spans: list[tuple[int, int]] = []
    for other in others:
        span_text, _, after = other.partition(SPAN_END)
        spans.append((len(text), len(text) + len(span_text)))
        text += span_text + after
    messages = conversation.turns
    last = max(index for index, turn in enumerate(messages) if turn["role"] == "assistant")
    opened = template.generation_prompt(replace(conversation, turns=messages[:last]))
    # A tag may include the text with which the template opens the turn.
    return text, [
        (begin + len(opened) if text.startswith(opened, begin) else begin, end)
        for begin, end in spans
    ]


def _locate_assistant_text(
    template: ChatTemplate, conversation: Conversation, last: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text that the template writes, and the spans of the assistant's turns in it, or of the
    last one only: each from the text before the turn to the text including it."""
    messages = conversation.turns
    selected = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    selected = selected[-1:] if last else selected
    requests = [(conversation, False)]
    for index in selected:
        requests.append((replace(conversation, turns=messages[:index]), True))
        if index + 1 < len(messages):
            requests.append((replace(conversation, turns=messages[: index + 1]), False))
    texts = iter(template.write_all(requests))
    full_text, spans, end = text_or_raise(next(texts)), list[tuple[int, int]](), 0
    for index in selected:
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
