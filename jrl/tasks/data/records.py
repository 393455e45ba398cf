"""Records: fields of a line, of a row or of a user's own list.

A record has the texts "prompt" and "answer" (a number will do as an answer). In place of the prompt
it may have "messages", the turns of a conversation from which a chat template makes the prompt, or
the prompt is such a list itself; in place of the answer a "completion", a text or messages.
ShareGPT's "conversations" are read, and a "text" of which every token is trained on. The fields may
have other names. All other fields are kept for rewards. Reinforcement and supervised fine-tuning
read the same record in the same way: in the former the policy answers the prompt, in the latter it
trains on the answer as well.
"""

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jrl.tasks.data.conversations import (
    Conversation,
    Turn,
    has_more,
    plainly,
    template_arguments_of,
    tools_of,
    turns_of,
)
from jrl.tasks.data.fields import (
    Fields,
    answer_text,
    checked_text,
    found,
    needed,
    needed_answer,
    short,
)
from jrl.tasks.task import Example

COMPLETION, TEXT = "completion", "text"
"""Fields with what is to be said after a prompt, and with a text that is learned as it is."""
MESSAGES = ("messages", "conversations", "conversation")
"""Fields that have a conversation, where there is no prompt."""


@dataclass(frozen=True)
class Read:
    """Contents of a record.

    Attributes:
      conversation: the prompt and, where the record has it as messages, the completion.
      asked: number of the messages that are the prompt.
      plain: whether the prompt is a text, and no conversation.
      text: trained on as it is, without a prompt; None for all others.
    """

    conversation: Conversation
    asked: int
    plain: bool = False
    text: str | None = None

    @property
    def gold(self) -> str | None:
        """The assistant's last message, where it is what the prompt asks for."""
        turns = self.conversation.turns
        if len(turns) == self.asked or turns[-1]["role"] != "assistant":
            return None
        return turns[-1]["content"]


def read_record(record: Any, place: str, fields: Fields) -> Read:
    """Reads a record.

    Args:
      place: where it is from, for messages.
      fields: names of its fields.

    Raises:
      ValueError: where a field is missing or cannot be what it is for.
    """
    if not isinstance(record, Mapping):
        raise ValueError(
            f'{place}: holds a {type(record).__name__}: write an object with "prompt" and '
            '"answer", or with "messages"'
        )
    name = fields.messages
    if name is None and found(record, fields.prompt) is None:
        present = [each for each in MESSAGES if record.get(each) is not None]
        if not present and isinstance(record.get(TEXT), str):
            return Read(Conversation(()), 0, text=checked_text(record[TEXT], TEXT, place))
        name = present[0] if present else None
    if name is None:
        asked, plain = _prompt(record, fields.prompt, place)
    else:
        asked, plain = turns_of(record, needed(record, name, place), name, place), False
        system = record.get("system")
        if name == "conversations" and isinstance(system, str) and asked[0]["role"] != "system":
            asked = ({"role": "system", "content": system}, *asked)
    said = () if name is not None else _completion(record, place)
    num_asked = len(asked)
    if not said and asked[-1]["role"] == "assistant":
        num_asked -= 1
    tools, arguments = tools_of(record, place), template_arguments_of(record, place)
    return Read(Conversation((*asked, *said), tools, arguments), num_asked, plain)


def example_of(
    record: Any, place: str, fields: Fields | None = None, *, answered: bool = False
) -> Example:
    """The example that a record describes: its prompt, and its answer where it has one.

    Args:
      place: where it is from, for messages.
      fields: names of the fields; None is `Fields()`.
      answered: whether it must have an answer; otherwise that of one without is empty.

    Raises:
      ValueError: where a field is missing or cannot be what it is for.
    """
    fields = Fields() if fields is None else fields
    read = read_record(record, place, fields)
    if read.text is not None:
        needed(record, fields.prompt, place)
        raise ValueError(
            f'{place}: field "{fields.prompt}" is null, and "{TEXT}" is a text that sft alone '
            f"learns: give --prompt-field {TEXT} where it is the prompt"
        )
    turns = read.conversation.turns[: read.asked]
    if not turns:
        raise ValueError(
            f"{place}: nothing is asked before the assistant's turn: put a message of the user "
            "before it"
        )
    gold = read.gold
    if found(record, fields.answer) is not None or (answered and gold is None):
        answer = needed_answer(record, fields.answer, place)
    else:
        answer = gold or ""
    conversation = read.conversation
    return Example(
        readable(turns),
        answer,
        () if read.plain else plainly(turns),
        {field: value for field, value in record.items() if field != fields.prompt},
        hidden=_beside(turns, conversation),
        tools=tuple(json.dumps(tool, default=plain) for tool in conversation.tools or ()),
        opening=() if read.plain else turns,
        template_arguments=conversation.arguments,
    )


def check_sendable(example: Example, place: str) -> None:
    """Refuses a record whose fields cannot be sent to the process of a reward.

    Raises:
      ValueError: naming the field.
    """
    for field, value in example.record.items():
        if not isinstance(field, str):
            raise ValueError(f"{place}: field {short(field)} is no text: name it by one")
        try:
            json.dumps(value, default=plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f'{place}: field "{field}" is {short(value)}, which cannot be sent to the '
                f"process of a reward ({error}): leave it out, or make it a text"
            ) from error


def plain(value: Any) -> Any:
    """Converts values that JSON cannot hold: dates to texts, decimals to floats, arrays to
    lists."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is nothing that JSON holds")


def readable(turns: Iterable[Turn]) -> str:
    """The conversation for people: a single question is itself."""
    pairs = plainly(turns)
    if len(pairs) == 1 and pairs[0][0] == "user":
        return pairs[0][1]
    return "\n".join(f"{role}: {content}" for role, content in pairs)


def _prompt(record: Mapping[str, Any], name: str, place: str) -> tuple[tuple[Turn, ...], bool]:
    """The messages of a prompt, and whether it is a text."""
    value = needed(record, name, place)
    if isinstance(value, list | Mapping):
        return turns_of(record, value, name, place), False
    return ({"role": "user", "content": checked_text(value, name, place)},), True


def _completion(record: Mapping[str, Any], place: str) -> tuple[Turn, ...]:
    """The messages of a record's completion; none without one."""
    value = found(record, COMPLETION)
    if value is None:
        return ()
    if isinstance(value, list | Mapping):
        return turns_of(record, value, COMPLETION, place)
    return ({"role": "assistant", "content": answer_text(value, COMPLETION, place)},)


def _beside(turns: tuple[Turn, ...], conversation: Conversation) -> str:
    """Inputs of a chat template besides roles and contents, as one text; empty without any."""
    more: dict[str, Any] = {}
    if has_more(turns):
        more["messages"] = turns
    if conversation.tools:
        more["tools"] = conversation.tools
    if conversation.arguments:
        more["chat_template_kwargs"] = conversation.arguments
    return json.dumps(more, sort_keys=True, default=plain) if more else ""
