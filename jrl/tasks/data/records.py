"""Records: a line of a file, a row of a table, or an item of a custom list.

A record has the texts "prompt" and "answer" (a number will do as an answer). In place of the prompt
it may have "messages", the turns of a conversation from which a chat template makes the prompt, or
the prompt is such a list itself; in place of the answer a "completion", a text or messages. If
there is neither, the prompt is the "question", "problem", "instruction" or "query".
ShareGPT's "conversations" are read, and a "text" of which every token is trained on. A "system"
message comes before all of these. The fields may have other names. Fields of other libraries that
would change a prompt and are not read are rejected (`UNREAD`); all others are kept for rewards.
Reinforcement learning and supervised fine-tuning read the same record in the same way: in the
former the policy answers the prompt, the latter also trains on the answer. Errors are raised as in
`jrl.tasks.data.fields`.
"""

import datetime
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jrl.tasks.data.conversations import (
    Conversation,
    Turn,
    parse_messages,
    role_content_pairs,
    template_arguments_of,
    tools_of,
)
from jrl.tasks.data.fields import (
    CONVERSATION_NAMES,
    TEXT,
    Fields,
    JsonObject,
    answer_text,
    check_text,
    find_prompt,
    get_field,
    require_answer,
    require_field,
    short,
)
from jrl.tasks.data.training_fields import TRAINED, is_trained
from jrl.tasks.task import Example

COMPLETION = "completion"
"""Field with the completion of a prompt."""
SYSTEM = ("system", "system_prompt")
"""Fields with the system message of a record (LLaMA-Factory, ms-swift, ShareGPT, OpenOrca)."""
_MEDIA = "only texts are read: leave the record out, or the field if its text does not need it"
UNREAD = {
    "functions": 'write them as "tools"',
    "history": 'write the earlier turns as "messages"',
    "enable_thinking": 'write "chat_template_kwargs": {"enable_thinking": ...}',
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _MEDIA),
}
"""Fields that would change a prompt and are not read (OpenAI, LLaMA-Factory, verl, TRL, ms-swift),
with the remedy. Empty ones are passed over."""
STEERED = ("VALUE_TO_TEXT", "TEXT_TO_VALUE")
"""Values of "type" in NeMo's conversations whose turns have labels beside their texts."""


@dataclass(frozen=True)
class ParsedRecord:
    """Contents of a record.

    Attributes:
      conversation: the prompt and, where the record has it as messages, the completion.
      num_prompt_messages: number of the messages that are the prompt.
      is_text: whether the prompt is a text; otherwise it is a conversation.
      text: trained on as it is, with no prompt; None for all others.
    """

    conversation: Conversation
    num_prompt_messages: int
    is_text: bool = False
    text: str | None = None


def read_record(record: Any, location: str, fields: Fields) -> ParsedRecord:
    """Reads a record: its conversation, or its text."""
    if not isinstance(record, Mapping):
        raise ValueError(
            f'{location}: holds a {type(record).__name__}: write an object with "prompt" and '
            '"answer", or with "messages"'
        )
    name = fields.messages
    if name is None and get_field(record, fields.prompt) is None:
        present = [each for each in CONVERSATION_NAMES if record.get(each) is not None]
        if not present and isinstance(record.get(TEXT), str):
            _check_unread(record, fields, location, is_text=True)
            for other in ("tools", *SYSTEM):
                if get_field(record, other) not in (None, "", []):
                    raise ValueError(
                        f'{location}: has "{other}" beside "{TEXT}", which is trained on as it is: '
                        'write "messages", or leave it out'
                    )
            return ParsedRecord(Conversation(()), 0, text=check_text(record[TEXT], TEXT, location))
        name = present[0] if present else None
    is_text, completion = False, ()
    if name is None:
        value = _decode_dialogue(require_field(record, fields.prompt, location), location)
        is_text = not isinstance(value, list | Mapping)
        prompt = _read_messages(record, value, fields.prompt, location, "user")
        if (value := _decode_dialogue(get_field(record, COMPLETION), location)) is not None:
            completion = _read_messages(record, value, COMPLETION, location, "assistant")
    else:
        prompt = parse_messages(record, require_field(record, name, location), name, location)
    _check_unread(record, fields, location, is_text=is_text)
    if system := _read_system(record, fields, prompt[0], location):
        prompt, is_text = (system, *prompt), False
    is_answered = not completion and prompt[-1]["role"] == "assistant"
    tools, arguments = tools_of(record, location), template_arguments_of(record, location)
    conversation = Conversation((*prompt, *completion), tools, arguments)
    return ParsedRecord(conversation, len(prompt) - is_answered, is_text)


def _read_system(
    record: Mapping[str, Any], fields: Fields, first: Turn, location: str
) -> Turn | None:
    """The system message in a field of its own; None without, and if it is the `first` message."""
    for name in SYSTEM:
        value = record.get(name)
        # In a table every row has this field; it is empty for records that have no system message.
        is_empty = value is None or (isinstance(value, str) and not value.strip())
        if is_empty or name in (fields.prompt, fields.answer):
            continue
        message = {"role": "system", "content": check_text(value, name, location)}
        if first["role"] not in ("system", "developer"):
            return message
        if first["content"] != value:
            raise ValueError(
                f'{location}: field "{name}" is {short(value)}, and the first message is another '
                "system message: keep one of them"
            )
    return None


def _check_unread(
    record: Mapping[str, Any], fields: Fields, location: str, *, is_text: bool
) -> None:
    """Rejects a record with a field that would change its prompt and is not read."""
    named = (fields.prompt, fields.answer, fields.messages)
    for name, remedy in UNREAD.items():
        value = get_field(record, name)
        # Empty in the rows of a table that have none.
        is_empty = value is None if name == "enable_thinking" else not value
        if name in named or is_empty or value == "":
            continue
        if name != "history" or (is_text and isinstance(value, list)):
            raise ValueError(
                f'{location}: field "{name}" is {short(value)}, which is not read: {remedy}'
            )
    extra = get_field(record, "input")
    if fields.prompt == "instruction" and fields.answer != "input" and extra:
        raise ValueError(
            f'{location}: field "input" is {short(extra)}, and only "instruction" is read: join '
            "the two in the file"
        )
    if (kind := get_field(record, "type")) in STEERED:
        raise ValueError(
            f'{location}: field "type" is {short(kind)}, and labels of turns are not '
            "read: write them into the texts"
        )


def _decode_dialogue(value: Any, location: str) -> Any:
    """The messages in a field, if it is the JSON text of a list of them; else its value."""
    if not isinstance(value, str) or not _DIALOGUE.match(value):
        return value
    try:
        return json.loads(value, object_hook=JsonObject)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{location}: {short(value)} begins as a list of messages and is no JSON ({error}): "
            "write JSON, or a text"
        ) from error


_DIALOGUE = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from|content|value)["']\s*:""")


def example_of(
    record: Any, location: str, fields: Fields | None = None, *, answered: bool = False
) -> Example:
    """The example that a record describes: its prompt, and its answer if it has one.

    Args:
      location: file and line of the record.
      fields: names of its fields; None is `Fields()`.
      answered: whether an answer is required; otherwise a missing one is empty.
    """
    fields = find_prompt(record, fields, location)
    parsed = read_record(record, location, fields)
    if parsed.text is not None:
        require_field(record, fields.prompt, location)
        raise ValueError(
            f'{location}: field "{fields.prompt}" is null, and "{TEXT}" is a text that only sft '
            f"trains on: give --prompt-field {TEXT} where it is the prompt"
        )
    conversation, number = parsed.conversation, parsed.num_prompt_messages
    messages, completion = conversation.turns[:number], conversation.turns[number:]
    if not messages:
        raise ValueError(
            f"{location}: no user message precedes the assistant's turn: put one before it"
        )
    is_reference = bool(completion) and completion[-1]["role"] == "assistant"
    reference = completion[-1]["content"] if is_reference else None
    has_answer = get_field(record, fields.answer) is not None
    if reference is not None and not has_answer and not is_trained(completion[-1]):
        raise ValueError(
            f"{location}: the assistant's last turn is the reference answer, and the record says "
            'that it is not trained on: leave the record out, or give its "answer"'
        )
    messages = tuple({k: v for k, v in turn.items() if k != TRAINED} for turn in messages)
    if has_answer or (answered and reference is None):
        answer = require_answer(record, fields.answer, location, has_prompt=parsed.is_text)
    else:
        answer = reference or ""
    return Example(
        format_dialogue(messages),
        answer,
        () if parsed.is_text else role_content_pairs(messages),
        {field: value for field, value in record.items() if field != fields.prompt},
        hidden=_hidden_inputs(messages, conversation),
        tools=tuple(json.dumps(tool, default=to_json_value) for tool in conversation.tools or ()),
        opening=() if parsed.is_text else messages,
        template_arguments=conversation.arguments,
        location=location,
    )


def check_sendable(example: Example, location: str) -> None:
    """Rejects a record whose fields cannot be sent to the process of a reward.

    Raises:
      ValueError: naming the field.
    """
    for field, value in example.record.items():
        if not isinstance(field, str):
            raise ValueError(
                f"{location}: field {short(field)} is not a text: name the field by a text"
            )
        try:
            json.dumps(value, default=to_json_value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f'{location}: field "{field}" is {short(value)}, which cannot be sent to the '
                f"process of a reward ({error}): leave it out, or make it a text"
            ) from error


def to_json_value(value: Any) -> Any:
    """Converts values that JSON cannot hold: dates to texts, decimals to floats, arrays to
    lists."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def as_json(value: Any) -> Any:
    """The value after conversion to JSON, as another process receives it.

    Raises:
      TypeError: if JSON cannot represent it.
    """
    return json.loads(json.dumps(value, default=to_json_value))


def format_dialogue(messages: Iterable[Turn]) -> str:
    """The conversation as readable text; a single question is unchanged."""
    pairs = role_content_pairs(messages)
    if len(pairs) == 1 and pairs[0][0] == "user":
        return pairs[0][1]
    return "\n".join(f"{role}: {content}" for role, content in pairs)


def _read_messages(
    record: Mapping[str, Any], value: Any, name: str, location: str, role: str
) -> tuple[Turn, ...]:
    """The messages in a field, or a single message of this role if the field is a text."""
    if isinstance(value, list | Mapping):
        return parse_messages(record, value, name, location)
    as_text = check_text if role == "user" else answer_text
    return ({"role": role, "content": as_text(value, name, location)},)


def _hidden_inputs(messages: tuple[Turn, ...], conversation: Conversation) -> str:
    """Inputs of a chat template besides roles and contents, as one text; empty if there are
    none."""
    inputs: dict[str, Any] = {}
    if any(set(turn) - {"role", "content"} or turn["content"] is None for turn in messages):
        inputs["messages"] = messages
    if conversation.tools:
        inputs["tools"] = conversation.tools
    if conversation.arguments:
        inputs["chat_template_kwargs"] = conversation.arguments
    return json.dumps(inputs, sort_keys=True, default=to_json_value) if inputs else ""
