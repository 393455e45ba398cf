"""Datasets of conversations for supervised fine-tuning.

A record has "messages", the turns of a conversation with at least one of the assistant,

``{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}``

or a "prompt" and its "completion" ("answer" will do), or a "text" alone. All forms of a record are
described in `jrl.tasks.data.records`, which reads records for reinforcement learning as well.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jrl.tasks.data.conversations import ROLES, Conversation, content_of
from jrl.tasks.data.fields import (
    ANSWER_FLAGS,
    Fields,
    describe_fields,
    find_prompt,
    get_field,
    require_answer,
    suggest_flags,
)
from jrl.tasks.data.files import KINDS, kind_of, name_prompts, read_records
from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.data.records import format_dialogue, read_record, to_json_value
from jrl.tasks.data.split import HeldOut
from jrl.tasks.data.training_fields import check_record, is_trained
from jrl.tasks.task import CORRECT, WRONG, Example, Verdict, pair_completions, special_of


@dataclass(frozen=True)
class Chat(Example):
    """A conversation to train on.

    As an example, it is its beginning: `prompt` is all that precedes the assistant's first turn
    (its last one if only that is trained on), and `answer` is that turn.

    Attributes:
      conversation: all messages; empty for a text.
      text: trained on as it is; None for a conversation.
      index: number of the conversation within its task.
    """

    conversation: Conversation = field(default=Conversation(()), compare=False, repr=False)
    text: str | None = field(default=None, compare=False, repr=False)
    index: int = field(default=-1, compare=False)

    @property
    def is_pair(self) -> bool:
        """True if it is one question and one answer, and nothing else."""
        return [message["role"] for message in self.conversation.turns] == ["user", "assistant"]


class Chats(PromptList[Chat]):
    """A list of conversations: some are held out, the others are trained on in repeated passes.

    The prompt of a conversation selects its side: conversations with an equal start stay together.
    """

    kind, _fix = "conversations", "raise --max-length, or give --overlong truncate"

    def _measure(self, examples: Sequence[Chat]) -> None:
        super()._measure(examples)
        texts = [content_of(message) for chat in self.chats for message in chat.conversation.turns]
        texts += [chat.text for chat in self.chats if chat.text is not None]
        # Role names separate the turns of a conversation if there is no chat template.
        writes_roles = any(chat.text is None and not chat.is_pair for chat in self.chats)
        roles = (": \n", *ROLES) if writes_roles else ()
        self.characters = "".join(sorted(set().union(*texts, *roles)))

    def content_of(self, example: Chat) -> list[Any]:
        # Not the answer, which depends on the tokenizer after `answer_with`.
        conversation = example.conversation
        texts = [example.text, conversation.turns, conversation.tools, conversation.arguments]
        return [*texts, dict(example.record)]

    @property
    def chats(self) -> list[Chat]:
        """All of them, in the order of the list."""
        return list(self.examples)

    @property
    def num_train(self) -> int:
        """Number of conversations to train on."""
        return len(self._train)

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Compares completions with the assistant's reference messages, up to surrounding
        blanks."""
        pairs = pair_completions(examples, completions)
        return [CORRECT if e.answer.strip() == special_of(t).strip() else WRONG for e, t in pairs]

    def answer_with(self, answers: Mapping[int, str]) -> None:
        """Sets the answers of conversations, by index, to the assistant's turns as the network
        writes them: with reasoning and tool calls, which a message's content does not contain."""

        self._train, self._heldout, self.examples = (
            [replace(chat, answer=answers[chat.index]) for chat in chats]
            for chats in (self._train, self._heldout, self.examples)
        )

    def close(self) -> None:
        """Does nothing: there is no worker process."""


def load_chats(
    spec: str,
    seed: int,
    fields: Fields | None = None,
    *,
    held_out: HeldOut | None = None,
    last: bool = False,
) -> Chats:
    """The conversations of ``jsonl:PATH``, ``csv:PATH``, ``parquet:PATH`` or ``dataset:DIR``.

    Args:
      seed: picks the order of the training conversations.
      fields: names of the fields; None is `Fields()`.
      held_out: which conversations are held out; None is one in ten.
      last: whether only the last turn of the assistant is trained on.

    Raises:
      ValueError: there is no such file, or a record is no conversation to train on.
    """
    kind, _, path = spec.partition(":")
    if kind not in KINDS or not path:
        raise ValueError(
            f"task={spec!r} has no conversations: sft trains on jsonl:PATH, csv:PATH, "
            "parquet:PATH or dataset:DIR, whose records have messages, or a prompt and a completion"
        )

    names: dict[str, None] = {}

    def read(kind: str, path: str, first: int) -> list[Chat]:
        records = name_prompts(read_records(kind, path), fields, names)
        return [
            chat_of(record, location, fields, last=last, index=index)
            for index, (location, record) in enumerate(records, first)
        ]

    chats, heldout_chats = read(kind, path, 0), None
    if held_out is not None and held_out.path is not None:
        heldout_chats = read(kind_of(held_out.path), held_out.path, len(chats))
    if len(chats) < (2 if heldout_chats is None else 1):
        raise ValueError(
            f"{path}: has {len(chats)} conversations; at least 2 are needed, one to train on and "
            "one held out"
        )
    if heldout_chats is None and len({chat.identity for chat in chats}) < 2:
        raise ValueError(
            f"{path}: all conversations start with the same messages, so that none can be held "
            "out: give a file of others as --held-out"
        )
    result = Chats(spec, chats, seed, held_out, heldout_chats, stream=kind)
    result.prompt_fields = tuple(names)
    return result


def chat_of(
    record: Any,
    location: str,
    fields: Fields | None = None,
    *,
    last: bool = False,
    index: int = -1,
) -> Chat:
    """The conversation that a record describes, number `index` of its task; `fields` and `last` are
    as of `load_chats`, errors as in `jrl.tasks.data.fields`."""
    fields = find_prompt(record, fields, location)
    parsed = read_record(record, location, fields)
    check_record(record, location, (fields.prompt, fields.answer, fields.messages))
    if (text := parsed.text) is not None:
        # Split by its text: equal texts are on the same side.
        return Chat("", text, record=record, hidden=text, text=text, location=location, index=index)
    conversation, messages = parsed.conversation, parsed.conversation.turns
    answered = parsed.is_text or get_field(record, fields.answer) is not None
    if messages[-1]["role"] != "assistant" and answered:
        # A question and its answer, as in reinforcement learning.
        answer = require_answer(record, fields.answer, location, has_prompt=parsed.is_text)
        messages = (*messages, {"role": "assistant", "content": answer})
    positions = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if not positions:
        raise ValueError(
            f"{location}: the assistant's turn is empty, so that there is nothing to train on "
            f"{describe_fields(record)}: add its turn, or name the answer's field with "
            f"{suggest_flags(record, ANSWER_FLAGS)}"
        )
    positions = [n for n in positions[-1 if last else 0 :] if is_trained(messages[n])]
    if not positions:
        turns = "the assistant's last turn" if last else "any of the assistant's turns"
        raise ValueError(
            f"{location}: the record says not to train on {turns}, so that there is nothing to "
            "train on: leave the record out"
        )
    first = positions[0]
    return Chat(
        prompt=format_dialogue(messages[:first]),
        answer=content_of(messages[first]),
        record={key: value for key, value in record.items() if key != fields.prompt},
        tools=tuple(json.dumps(tool, default=to_json_value) for tool in conversation.tools or ()),
        opening=messages[:first],
        template_arguments=conversation.arguments,
        conversation=replace(conversation, turns=messages),
        location=location,
        index=index,
    )
