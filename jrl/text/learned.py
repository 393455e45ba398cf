"""A conversation as tokens, and which of them the assistant said: what a policy learns from.

With a chat template the tokens are those of what it writes. What of it is the assistant's is told
by the template's own ``{% generation %}`` marks where it has them, and otherwise by rendering the
conversation up to each of its turns, opened for it, and up to the turn's end: the text between the
two. Its end is the first token that ends a completion; what a template writes after that (a line
end, mostly) no policy ever samples, and it is not learned. Where a template ends a turn by the
beginning of the next alone, as GLM's does, the end of sequence comes after the last turn.

Without a template a question and an answer are the tokens of both and the end of sequence, as
reinforcement has them; a longer conversation is written with the roles before what they say:

    user: 2 + 2?
    assistant: 4
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jrl.tasks import Example
from jrl.tasks.data.chats import Chat, Turn
from jrl.text.chat import BEGIN, END, ChatTemplate, cut_specials, unused
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer

Part = tuple[list[int], bool]
"""Tokens, and whether the assistant said them."""


@dataclass(frozen=True)
class Encoded:
    """A conversation as a policy learns from it, up to the last token that is learned.

    Attributes:
      ids: ``[time]`` its tokens.
      learned: ``[time]`` which of them are learned, never the first.
      context: tokens before the first one that is learned.
    """

    ids: np.ndarray
    learned: np.ndarray
    context: int

    def cut(self, most: int) -> "Encoded | None":
        """Its first tokens; None where none of these is learned."""
        learned = self.learned[:most]
        return Encoded(self.ids[:most], learned, self.context) if learned.any() else None


@dataclass(frozen=True)
class ChatFormat(PromptFormat):
    """The prompts of conversations are their own tokens; all others are as `PromptFormat` has them.

    Attributes:
      last: whether the last turn of the assistant alone is learned.
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
      last: whether the last turn of the assistant alone is learned.

    Raises:
      ValueError: naming the record, where the template refuses it, or writes the beginning of a
        conversation otherwise than at the beginning of the whole.
    """
    try:
        if format.template is None:
            parts = _plain(format, chat)
        else:
            parts = list(_written(format, format.template, chat, last))
    except ValueError as error:
        raise ValueError(f"{chat.place}: {error}") from error
    spoken = [at for at, (ids, said) in enumerate(parts) if said and ids]
    chosen = spoken[-1:] if last else spoken
    encoded = _joined([(ids, at in chosen) for at, (ids, _) in enumerate(parts)], format.tokenizer)
    if encoded is None:
        raise ValueError(
            f"{chat.place}: the assistant's turns have no token to learn: leave the record out"
        )
    return encoded


def _turns(format: PromptFormat, chat: Chat) -> list[Turn]:
    """The turns, with the system prompt of the run where they have none."""
    if format.system_prompt is None or chat.conversation[0]["role"] in ("system", "developer"):
        return list(chat.conversation)
    return [{"role": "system", "content": format.system_prompt}, *chat.conversation]


def _joined(parts: list[Part], tokenizer: Tokenizer) -> Encoded | None:
    """All parts in a row; of those that are learned each until its end, and the end of sequence
    after the last where nothing ends it. None learns nothing."""
    ids: list[int] = []
    learned: list[bool] = []
    open_ = False
    for own, said in parts:
        ends = [at for at, token in enumerate(own) if token in tokenizer.stop_ids]
        if said:
            number = ends[0] + 1 if ends else len(own)
            open_ = not ends
        else:
            # The end of a turn may stand behind the template's mark.
            number = int(open_ and ends[:1] == [0])
            open_ = open_ and not own
        ids += own
        learned += [place < number for place in range(len(own))]
    found = np.array(learned[:1] and [False, *learned[1:]], bool)
    if not found.any():
        return None
    places = np.flatnonzero(found)
    end, context = places[-1] + 1, int(places[0])
    if ids[end - 1] in tokenizer.stop_ids:
        return Encoded(np.array(ids[:end], np.int32), found[:end], context)
    ids, found = [*ids[:end], tokenizer.eos_id], np.append(found[:end], True)
    return Encoded(np.array(ids, np.int32), found, context)


def _plain(format: PromptFormat, chat: Chat) -> list[Part]:
    """Without a template."""
    encode, end = format.tokenizer.encode, format.tokenizer.eos_id
    if any(turn.get("tool_calls") for turn in chat.conversation) or chat.schemas is not None:
        raise ValueError(
            "it has tools, and the model no chat template to write them with: give "
            "--chat-template FILE"
        )
    before = [*format.tokenizer.prefix]
    if chat.is_pair:
        question, answer = (turn["content"] for turn in chat.conversation)
        return [([*before, *encode(question)], False), ([*encode(answer), end], True)]
    parts: list[Part] = [(before, False)]
    for number, turn in enumerate(chat.conversation):
        opened = ("\n" if number else "") + turn["role"] + ": "
        if turn["role"] == "assistant":
            parts += [(encode(opened), False), ([*encode(turn["content"]), end], True)]
        else:
            parts.append((encode(opened + turn["content"]), False))
    return parts


def _written(
    format: PromptFormat, template: ChatTemplate, chat: Chat, last: bool
) -> Iterator[Part]:
    """By a template. A special token that a message spells is text, as in prompts
    (`jrl.text.chat.ChatTemplate`)."""
    tokenizer, turns = format.tokenizer, _turns(format, chat)
    texts: list[str] = []
    _changed([turns, chat.schemas], lambda text: (texts.append(text), text)[1])
    everything, special = "".join(texts), tokenizer.special_tokens
    mark = unused(everything)
    turns, tools = _changed([turns, chat.schemas], lambda text: cut_specials(text, special, mark))
    if template.marks:
        if BEGIN in everything or END in everything:
            raise ValueError("it has U+FDD0 or U+FDD1, which are no characters: leave them out")
        found = _by_marks(template.write(turns, tools, marked=True))
    else:
        found = _by_beginnings(template, turns, tools, last)
    for text, said in found:
        parts = (tokenizer.encode_special(part) for part in text.split(mark) if part)
        yield [token for part in parts for token in part], said


def _by_marks(text: str) -> Iterator[tuple[str, bool]]:
    """The text between the marks of a template, and that around them."""
    first, *others = text.split(BEGIN)
    yield first, False
    for other in others:
        said, _, after = other.partition(END)
        yield said, True
        yield after, False


def _by_beginnings(
    template: ChatTemplate, turns: Sequence[Turn], tools: Any, last: bool
) -> Iterator[tuple[str, bool]]:
    """The assistant's text between what the template writes before each of its turns and after it.

    Args:
      last: whether the last turn alone is asked for.
    """
    whole, end = template.write(turns, tools), 0
    spoken = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
    for at in spoken[-1:] if last else spoken:
        before = template.write(turns[:at], tools, opened=True)
        after = template.write(turns[: at + 1], tools)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
            raise ValueError(
                f"the chat template writes the first {at + 1} messages otherwise than at the "
                "beginning of the whole conversation, so that it does not say what the assistant "
                "wrote: give --learn last, or a template with {% generation %} marks as "
                "--chat-template"
            )
        yield whole[end : len(before)], False
        yield whole[len(before) : len(after)], True
        end = len(after)
    yield whole[end:], False


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with all its texts changed; names of fields and roles stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: v if k == "role" else _changed(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(each, change) for each in value]
    return value
