"""Conversations to learn from: what a file holds for the stage before reinforcement.

A record has "messages", the turns of a conversation in which the assistant says something,

``{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}``

or a "prompt" and its "completion" ("answer" will do), two texts. Roles are system, developer, user,
assistant and tool. A turn keeps its other fields (tool calls, reasoning), and a record its "tools",
for chat templates that write them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jrl.tasks.data.files import KINDS, kind_of, records
from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.data.records import Fields, checked_text, readable, short
from jrl.tasks.data.split import HeldOut
from jrl.tasks.task import CORRECT, WRONG, Example, Verdict, check_pairs

ROLES = ("system", "developer", "user", "assistant", "tool")
COMPLETION = "completion"
"""Field with what is to be said after a prompt."""

Turn = Mapping[str, Any]
"""A message: "role", "content" and whatever else it has."""


@dataclass(frozen=True)
class Chat(Example):
    """A conversation to learn from.

    As an example it is its beginning: `prompt` is what was said before the assistant's first turn,
    of its last one where that alone is learned, and `answer` is that turn.

    Attributes:
      conversation: all of it.
      schemas: descriptions of tools, as the record has them; None without.
      place: where it is from, for messages.
      number: counts the conversations of a task.
    """

    conversation: tuple[Turn, ...] = field(default=(), compare=False, repr=False)
    schemas: list[Any] | None = field(default=None, compare=False, repr=False)
    place: str = field(default="", compare=False)
    number: int = field(default=-1, compare=False)

    @property
    def is_pair(self) -> bool:
        """Whether it is a question and an answer, and nothing else."""
        return [turn["role"] for turn in self.conversation] == ["user", "assistant"]


class Chats(PromptList):
    """A list of conversations: some are held out, the others are gone through again and again.

    The side that one is on depends on its prompt: those that begin alike stay together.
    """

    _kind, _fix = "conversations", "raise --max-length, or say --overlong truncate"

    def _measure(self, examples: Sequence[Example]) -> None:
        super()._measure(examples)
        texts = [str(turn["content"]) for chat in self.chats for turn in chat.conversation]
        # What tells the turns of a conversation apart where no template writes it.
        roles = () if all(chat.is_pair for chat in self.chats) else (": \n", *ROLES)
        self.characters = "".join(sorted(set().union(*texts, *roles)))

    @property
    def chats(self) -> list[Chat]:
        """All of them, in the order of the list."""
        return [example for example in self.examples if isinstance(example, Chat)]

    @property
    def num_train(self) -> int:
        """How many are learned from."""
        return len(self._train)

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Whether completions are what the assistant said, blanks around it aside."""
        check_pairs(examples, completions)
        pairs = zip(examples, completions, strict=True)
        return [CORRECT if e.answer.strip() == text.strip() else WRONG for e, text in pairs]

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
      last: whether the last turn of the assistant alone is learned.

    Raises:
      ValueError: there is no such file, or a record is no conversation to learn from.
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
    if apart is None and len({chat.prompt for chat in chats}) < 2:
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
    if not isinstance(record, Mapping):
        raise ValueError(
            f'{place}: holds a {type(record).__name__}: write an object with "messages"'
        )
    name = fields.messages
    if name is None and record.get(fields.prompt) is None and "messages" in record:
        name = "messages"
    if name is None:
        said = COMPLETION if record.get(COMPLETION) is not None else fields.answer
        turns = (
            {"role": "user", "content": _text(record, fields.prompt, place)},
            {"role": "assistant", "content": _text(record, said, place)},
        )
    else:
        turns = _turns(record, name, place)
        if turns[-1]["role"] != "assistant" and record.get(fields.answer) is not None:
            # A question with its answer, as reinforcement reads it.
            answer = {"role": "assistant", "content": _text(record, fields.answer, place)}
            turns = (*turns, answer)
    spoken = [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        raise ValueError(
            f"{place}: the assistant says nothing, so that there is nothing to learn: add its "
            "turn, or leave the record out"
        )
    first = spoken[-1] if last else spoken[0]
    schemas = _tools(record.get("tools"), place)
    return Chat(
        prompt=readable((turn["role"], turn["content"]) for turn in turns[:first]),
        answer=turns[first]["content"],
        record={key: value for key, value in record.items() if key != fields.prompt},
        conversation=turns,
        schemas=schemas,
        tools=tuple(json.dumps(schema) for schema in schemas or ()),
        place=place,
        number=number,
    )


def _chats(kind: str, path: str, fields: Fields, last: bool, first: int) -> list[Chat]:
    return [
        chat_of(record, place, fields, last=last, number=number)
        for number, (place, record) in enumerate(records(kind, path), first)
    ]


def _turns(record: Mapping[str, Any], name: str, place: str) -> tuple[dict[str, Any], ...]:
    value: Any = record.get(name)
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy
    if not isinstance(value, list) or not value:
        raise ValueError(
            f'{place}: field "{name}" is {short(value)}: it must be a list of '
            '{"role": ..., "content": ...}'
        )
    return tuple(_turn(turn, f"{place}: message {n}") for n, turn in enumerate(value, start=1))


def _turn(turn: Any, place: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ValueError(f'{place} is {short(turn)}: write "role" and "content"')
    if turn.get("role") not in ROLES:
        raise ValueError(
            f"{place}: role is {short(turn.get('role'))}: it must be one of {', '.join(ROLES)}"
        )
    # Tables have every field in every row, empty where a record lacks it.
    kept = {key: value for key, value in turn.items() if value is not None}
    if turn["role"] == "assistant" and kept.get("tool_calls"):
        kept.setdefault("content", "")
        if kept["content"] == "":
            return kept
    return {**kept, "content": _text(turn, "content", place)}


def _tools(value: Any, place: str) -> list[Any] | None:
    """The tools of a record; a text is JSON, as tables have it."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of numpy
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f'{place}: field "tools" is a text and no JSON ({error}): write a list of tools'
            ) from error
    if not value:
        return None
    if not isinstance(value, list):
        raise ValueError(f'{place}: field "tools" is {short(value)}: write a list of tools')
    return value


def _text(record: Mapping[str, Any], name: str, place: str) -> str:
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = getattr(value, "written", str(value))
    return checked_text(value, name, place)
