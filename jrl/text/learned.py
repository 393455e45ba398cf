"""Tokens of a conversation, and the loss mask of the assistant's turns.

With a chat template, the tokens are those of the whole text that it writes. The template's own
``{% generation %}`` marks delimit the assistant's text, if it has them. Otherwise the conversation
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
from jrl.text.chat import BEGIN, END, ChatTemplate, written
from jrl.text.located.spelled import marked
from jrl.text.located.tokens import Located
from jrl.text.prompt_format import NO_TOOLS, PromptFormat
from jrl.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Tokens of a conversation and their loss mask, up to the last token that is trained on.

    Attributes:
      ids: ``[time]`` its tokens.
      learned: ``[time]`` loss mask, never true on the first.
      context: tokens before the first one that is trained on.
    """

    ids: np.ndarray
    learned: np.ndarray
    context: int

    @property
    def turn_length(self) -> int:
        """Tokens of the first turn that is learned, its end included."""
        others = np.flatnonzero(~self.learned[self.context :])
        return int(others[0]) if len(others) else len(self.ids) - self.context

    def cut(self, most: int) -> "Encoded | None":
        """Its first tokens; None if none of these is trained on."""
        learned = self.learned[:most]
        return Encoded(self.ids[:most], learned, self.context) if learned.any() else None


@dataclass(frozen=True)
class ChatFormat(PromptFormat):
    """The prompts of conversations are their own tokens; all others are as `PromptFormat` has them.

    Attributes:
      last: whether the last turn of the assistant alone is trained on.
    """

    last: bool = False

    def encode(self, example: Example) -> list[int]:
        if not isinstance(example, Chat):
            return super().encode(example)
        encoded = encode_chat(self, example, last=self.last)
        return encoded.ids[: encoded.context].tolist()


def encode_chat(format: PromptFormat, chat: Chat, *, last: bool = False) -> Encoded:
    """The tokens of a conversation.

    Args:
      last: whether the last turn of the assistant alone is trained on.

    Raises:
      ValueError: naming the record, where the template refuses it, or writes the beginning of a
        conversation otherwise than at the beginning of the whole.
    """
    try:
        if chat.text is not None:
            return _of_text(format.tokenizer, chat.text)
        if format.template is None:
            spoken = _plain(format, chat)
        else:
            spoken = _written(format, format.template, chat, last)
    except ValueError as error:
        raise ValueError(f"{chat.location}: {error}") from error
    encoded = _learned(spoken, format.tokenizer, last)
    if encoded is None:
        raise ValueError(
            f"{chat.location}: the assistant's turns have no token to learn: leave the record out"
        )
    return encoded


@dataclass(frozen=True)
class Spoken:
    """The tokens of a whole conversation, and who said them.

    Attributes:
      ids: ``[time]`` its tokens.
      turn: ``[time]`` which turn of the assistant each is of, counted from 0; -1 is of none.
    """

    ids: list[int]
    turn: np.ndarray


def _learned(spoken: Spoken, tokenizer: Tokenizer, last: bool) -> Encoded | None:
    """Builds the loss mask: tokens of each turn until its end, and the end of sequence after the
    last where nothing ends it; None if no token is trained on."""
    ids, turn = list(spoken.ids), spoken.turn
    learned = np.zeros(len(ids), bool)
    numbers = np.unique(turn[turn >= 0])
    for number in numbers[-1:] if last else numbers:
        places = np.flatnonzero(turn == number)
        ends = [place for place in places if ids[place] in tokenizer.stop_ids]
        behind = places[-1] + 1
        if not ends and behind < len(ids) and ids[behind] in tokenizer.stop_ids:
            # The end of a turn may stand behind the template's mark.
            places, ends = np.append(places, behind), [behind]
        learned[places[places <= ends[0]] if ends else places] = True
    # Nothing predicts the first token.
    learned[:1] = False
    if not learned.any():
        return None
    found = np.flatnonzero(learned)
    end, context = found[-1] + 1, int(found[0])
    if ids[end - 1] not in tokenizer.stop_ids:
        ids, learned = [*ids[:end], tokenizer.turn_end_id], np.append(learned[:end], True)
        end += 1
    return Encoded(np.array(ids[:end], np.int32), learned[:end], context)


def _of_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """A text that is trained on but for its first token, which nothing predicts."""
    ids = tokenizer.begun(tokenizer.encode_special(text))
    if ids[-1] not in tokenizer.stop_ids:
        ids = [*ids, tokenizer.eos_id]
    if len(ids) < 2:
        raise ValueError("its text has one token, which nothing predicts: leave the record out")
    learned = np.ones(len(ids), bool)
    learned[0] = False
    return Encoded(np.array(ids, np.int32), learned, 1)


def _plain(format: PromptFormat, chat: Chat) -> Spoken:
    """Without a template."""
    tokenizer, turns = format.tokenizer, chat.conversation.turns
    if any(turn.get("tool_calls") for turn in turns) or chat.conversation.tools is not None:
        raise ValueError(f"it {NO_TOOLS}")
    if chat.is_pair:
        question, answer = map(content_of, turns)
        before = tokenizer.begun(tokenizer.encode(question))
        own = [*tokenizer.continued(question, answer), tokenizer.eos_id]
        return Spoken([*before, *own], np.repeat([-1, 0], [len(before), len(own)]))
    ids, turn = list(tokenizer.prefix), [np.full(len(tokenizer.prefix), -1)]
    waiting, number = "", 0
    for at, each in enumerate(turns):
        waiting += ("\n" if at else "") + each["role"] + ": "
        if each["role"] != "assistant":
            waiting += content_of(each)
            continue
        # What stands between two ends is one text.
        own = tokenizer.placed(waiting + content_of(each))
        ids += [*own.ids, tokenizer.eos_id]
        spoken = own.within(len(waiting), len(waiting) + len(content_of(each)))
        turn += [np.where(spoken, number, -1), np.array([number])]
        waiting, number = "", number + 1
    return Spoken(ids, np.concatenate(turn))


def _written(format: PromptFormat, template: ChatTemplate, chat: Chat, last: bool) -> Spoken:
    """By a template. A special token that a message spells is text, as in prompts
    (`jrl.text.chat.ChatTemplate`)."""
    tokenizer = format.tokenizer
    format.check_shown(chat)
    own = marked(format.completed(chat.conversation), tokenizer.special_tokens)
    if template.marks:
        if BEGIN in own.texts or END in own.texts:
            raise ValueError("it has U+FDD0 or U+FDD1, which are no characters: leave them out")
        text, spans = _by_marks(template.write(own.conversation, marked=True))
        opening = template.opening(_asked(own.conversation))
        # A mark may enclose what the template itself begins the turn with.
        skipped = [len(opening) if text.startswith(opening, begin) else 0 for begin, _ in spans]
        spans = [(begin + n, end) for n, (begin, end) in zip(skipped, spans, strict=True)]
    else:
        text, spans = _by_beginnings(template, own.conversation, last)
    begins = [own.place(text, begin) for begin, _ in spans]
    ends = [own.place(text, end) for _, end in spans]
    located = tokenizer.located(text, own.mark)
    special = _are_special(tokenizer, located)
    joined = [
        begin
        for (begin, _), place in zip(spans, begins, strict=True)
        if np.any((located.begins < place) & (place < located.ends) & ~special)
    ]
    if joined:
        # The policy is asked after the tokens of the prompt alone.
        pieces = [text[a:b] for a, b in pairwise([0, *joined, len(text)])]
        located = Located.one_after_another(
            [tokenizer.located(piece, own.mark) for piece in pieces],
            [len(piece) - piece.count(own.mark) for piece in pieces],
        )
        special = _are_special(tokenizer, located)
    turn = np.full(len(located.ids), -1)
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        # Some special tokens take the blanks behind them along; nobody says those.
        turn[located.within(begin, end) & ~(special & (located.begins < begin))] = number
    ids = tokenizer.begun_by_template(located.ids)
    return Spoken(ids, np.concatenate([np.full(len(ids) - len(turn), -1), turn]))


def _are_special(tokenizer: Tokenizer, located: Located) -> np.ndarray:
    """``[tokens]`` bool."""
    return np.isin(located.ids, list(tokenizer.special_ids))


def _asked(conversation: Conversation) -> Conversation:
    """The conversation before the assistant's last turn."""
    turns = conversation.turns
    last = max(at for at, turn in enumerate(turns) if turn["role"] == "assistant")
    return replace(conversation, turns=turns[:last])


def _by_marks(marked_text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks of a template, and the places between them."""
    text, *others = marked_text.split(BEGIN)
    spans: list[tuple[int, int]] = []
    for other in others:
        own, _, after = other.partition(END)
        spans.append((len(text), len(text) + len(own)))
        text += own + after
    return text, spans


def _by_beginnings(
    template: ChatTemplate, conversation: Conversation, last: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text that the template writes, and the places of the assistant's in it, between what is
    written before each of its turns and after it.

    Args:
      last: whether the last turn alone is requested.
    """
    turns = conversation.turns
    spoken = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
    chosen = spoken[-1:] if last else spoken
    asked = [(conversation, False)]
    for at in chosen:
        asked.append((replace(conversation, turns=turns[:at]), True))
        if at + 1 < len(turns):
            asked.append((replace(conversation, turns=turns[: at + 1]), False))
    texts = iter(template.write_all(asked))
    whole, spans, end = written(next(texts)), list[tuple[int, int]](), 0
    for at in chosen:
        before = written(next(texts))
        after = whole if at + 1 == len(turns) else written(next(texts))
        closing = template.closing
        if not whole.startswith(after) and closing and after.endswith(closing):
            # Some templates end the last turn of all otherwise than those before it.
            after = after.removesuffix(closing)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
            raise ValueError(
                f"the chat template writes the first {at + 1} messages otherwise than at the "
                "beginning of the whole conversation, so that it does not say what the assistant "
                "wrote: give --learn last, or a template with {% generation %} marks as "
                "--chat-template"
            )
        spans.append((len(before), len(after)))
        end = len(after)
    return whole, spans
