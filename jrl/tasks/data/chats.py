"""Datasets of conversations for supervised fine-tuning.

A record has "messages", the turns of a conversation with at least one of the assistant,

``{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}``

or a "prompt" and its "completion" ("answer" will do), or a "text" alone. All forms of a record are
described in `jrl.tasks.data.records`, which reads records for reinforcement learning as well.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jrl.tasks.data.conversations import ROLES, Conversation, said
from jrl.tasks.data.fields import (
    OF_ANSWER,
    Fields,
    fields_there,
    found,
    instead,
    needed_answer,
)
from jrl.tasks.data.files import KINDS, kind_of, records
from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.data.records import plain, read_record, readable
from jrl.tasks.data.split import HeldOut
from jrl.tasks.rewards.completion import special_of
from jrl.tasks.task import CORRECT, WRONG, Example, Verdict, check_pairs


@dataclass(frozen=True)
class Chat(Example):
    """A conversation to train on.

    As an example it is its beginning: `prompt` is what was said before the assistant's first turn,
    of its last one where that alone is trained on, and `answer` is that turn.

    Attributes:
      conversation: all of it, empty of a text.
      text: trained on as it is; None where there is a conversation.
      place: where it is from, for messages.
      number: counts the conversations of a task.
    """

    conversation: Conversation = field(default=Conversation(()), compare=False, repr=False)
    text: str | None = field(default=None, compare=False, repr=False)
    place: str = field(default="", compare=False)
    number: int = field(default=-1, compare=False)

    @property
    def is_pair(self) -> bool:
        """True if it is one question and one answer, and nothing else."""
        return [turn["role"] for turn in self.conversation.turns] == ["user", "assistant"]


class Chats(PromptList):
    """A list of conversations: some are held out, the others are trained on in repeated passes.

    The side that one is on depends on its prompt: those with an equal start stay together.
    """

    _kind, _fix = "conversations", "raise --max-length, or say --overlong truncate"

    def _measure(self, examples: Sequence[Example]) -> None:
        super()._measure(examples)
        texts = [said(turn) for chat in self.chats for turn in chat.conversation.turns]
        texts += [chat.text for chat in self.chats if chat.text is not None]
        # What tells the turns of a conversation apart where no template writes it.
        apart = any(chat.text is None and not chat.is_pair for chat in self.chats)
        roles = (": \n", *ROLES) if apart else ()
        self.characters = "".join(sorted(set().union(*texts, *roles)))

    @property
    def chats(self) -> list[Chat]:
        """All of them, in the order of the list."""
        return [example for example in self.examples if isinstance(example, Chat)]

    @property
    def num_train(self) -> int:
        """Number of conversations to train on."""
        return len(self._train)

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Compares completions with the assistant's reference messages, apart from surrounding
        blanks."""
        check_pairs(examples, completions)
        pairs = zip(examples, completions, strict=True)
        return [CORRECT if e.answer.strip() == special_of(t).strip() else WRONG for e, t in pairs]

    def answer_with(self, answers: Mapping[int, str]) -> None:
        """Gives conversations, by their numbers, what the assistant says as the network writes it:
        with reasoning and calls of tools, which the content of its message has not."""

        def changed(examples: Iterable[Example]) -> list[Example]:
            return [
                replace(each, answer=answers[each.number]) if isinstance(each, Chat) else each
                for each in examples
            ]

        self._train, self._heldout = changed(self._train), changed(self._heldout)
        self.examples = tuple(changed(self.examples))

    def close(self) -> None:
        """There is nothing to end."""


def load_chats(
    spec: str,
    seed: int,
    fields: Fields | None = None,
    *,
    held_out: HeldOut | None = None,
    last: bool = False,
) -> Chats:
    """The conversations of ``jsonl:PATH``, ``parquet:PATH`` or ``dataset:DIR``.

    Args:
      seed: picks the order of the training conversations.
      fields: names of the fields; None is `Fields()`.
      held_out: which conversations are held out; None is one in ten.
      last: whether the last turn of the assistant alone is trained on.

    Raises:
      ValueError: there is no such file, or a record is no conversation to train on.
    """
    kind, _, path = spec.partition(":")
    if kind not in KINDS or not path:
        raise ValueError(
            f"task={spec!r} has no conversations: sft learns from jsonl:PATH, parquet:PATH or "
            "dataset:DIR, whose records have messages, or a prompt and a completion"
        )
    fields, apart = Fields() if fields is None else fields, None
    chats = _chats(kind, path, fields, last, 0)
    if held_out is not None and held_out.path is not None:
        apart = _chats(kind_of(held_out.path), held_out.path, fields, last, len(chats))
    if len(chats) < (2 if apart is None else 1):
        raise ValueError(
            f"{path}: has {len(chats)} conversations; at least 2 are needed, one to learn from and "
            "one held out"
        )
    if apart is None and len({chat.identity for chat in chats}) < 2:
        raise ValueError(
            f"{path}: all conversations begin alike, so that none can be held out: give a file of "
            "others as --held-out"
        )
    return Chats(spec, chats, seed, held_out, apart)


def chat_of(
    record: Any,
    place: str,
    fields: Fields | None = None,
    *,
    last: bool = False,
    number: int = -1,
) -> Chat:
    """The conversation that a record describes.

    Args:
      place: where it is from, for messages.
      fields, last: as of `load_chats`.
      number: of the conversation.

    Raises:
      ValueError: where a field is missing or cannot be what it is for.
    """
    fields = Fields() if fields is None else fields
    read = read_record(record, place, fields)
    if read.text is not None:
        return _of_text(record, read.text, place, number)
    turns = read.conversation.turns
    answered = read.plain or found(record, fields.answer) is not None
    if turns[-1]["role"] != "assistant" and answered:
        # A question with its answer, as reinforcement reads it.
        answer = needed_answer(record, fields.answer, place)
        turns = (*turns, {"role": "assistant", "content": answer})
    spoken = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        raise ValueError(
            f"{place}: the assistant says nothing, so that there is nothing to learn "
            f"{fields_there(record)}: add its turn, or name the answer's field with "
            f"{instead(record, OF_ANSWER)}"
        )
    first = spoken[-1] if last else spoken[0]
    tools = read.conversation.tools
    return Chat(
        prompt=readable(turns[:first]),
        answer=said(turns[first]),
        record={key: value for key, value in record.items() if key != fields.prompt},
        tools=tuple(json.dumps(tool, default=plain) for tool in tools or ()),
        opening=turns[:first],
        template_arguments=read.conversation.arguments,
        conversation=replace(read.conversation, turns=turns),
        place=place,
        number=number,
    )


def _of_text(record: Any, text: str, place: str, number: int) -> Chat:
    """A text of which everything is learned; where it is held out, others like it are as well."""
    return Chat(
        prompt="", answer=text, record=record, hidden=text, text=text, place=place, number=number
    )


def _chats(kind: str, path: str, fields: Fields, last: bool, first: int) -> list[Chat]:
    return [
        chat_of(record, place, fields, last=last, number=number)
        for number, (place, record) in enumerate(records(kind, path), first)
    ]
