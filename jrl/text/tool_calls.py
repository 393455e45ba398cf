"""Tool calls in a conversation: the format of a chat template, and messages with their calls.

The formats and their parsers are in `jrl.tasks.tools.detection`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jrl.tasks.data.conversations import Conversation, Turn
from jrl.tasks.tools.call_format import ToolFormat
from jrl.tasks.tools.calls import Arguments, Call, ToolParameters, message_call
from jrl.tasks.tools.detection import FORMATS, detect_formats
from jrl.tasks.tools.tool import Tool
from jrl.text.chat import ChatTemplate
from jrl.text.tokenizer import Tokenizer


def _forecast(city: str, days: int) -> str:
    """Gives the weather of the next days."""
    return f"{city}, {days}"


PROBE = Tool.of(_forecast, name="get_forecast")
"""A tool whose call shows the notation of a template."""
ARGUMENTS = {"city": "Lima", "days": 3}
NAMELESS = "unknown"
"""Name of a call that has none, for templates."""


def tool_format_of(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat | None:
    """Tool-call format of a checkpoint with this template; None if it is not supported.

    It is the format that parses the call that the template writes; for a template that writes none,
    the format with marks in its source.
    """
    source = tokenizer.usage.chat_template
    candidates = detect_formats("" if source is None else source)
    schema, tools = PROBE.schema, {PROBE.name: PROBE.parameters}
    conversation = replace(Conversation.from_pairs([("user", "?")]), tools=[schema])
    call = Call(PROBE.name, ARGUMENTS)
    for format in (*candidates, *(each for each in FORMATS if each not in candidates)):
        message = _assistant_message("", [call], [format.call_id(call.name, 0)])
        try:
            without_call = template.write(conversation)
            with_call = template.write(replace(conversation, turns=(*conversation.turns, message)))
        except ValueError:
            return None
        text = _added_text(without_call, with_call)
        for end, identity in tokenizer.special_tokens.items():
            if identity in tokenizer.stop_ids:
                text = text.partition(end)[0]
        if PROBE.name not in text:
            return candidates[0] if candidates else None
        parsed = format.calls(text, tools)
        if [(each.name, each.arguments) for each in parsed] == [(call.name, ARGUMENTS)]:
            return format
    return None


def _added_text(before: str, after: str) -> str:
    """The rest of `after` from the first character that differs from `before`."""
    pairs = enumerate(zip(before, after, strict=False))
    return after[next((index for index, (a, b) in pairs if a != b), min(len(before), len(after))) :]


def shows_tools(template: ChatTemplate, tools: list[Any], names: Sequence[str]) -> bool:
    """True if a template writes tools: its text differs with them, and contains all their names."""
    conversation = Conversation.from_pairs([("user", "?")])
    rendered = template.render(replace(conversation, tools=tools))
    return rendered != template.render(conversation) and all(name in rendered for name in names)


def parse_calls(
    format: ToolFormat, tools: ToolParameters, texts: Sequence[str], first_index: int = 0
) -> Iterator[tuple[list[Call], list[str]]]:
    """Tool calls in each turn of a policy, and their ids.

    Args:
      first_index: number of earlier calls in the conversation.
    """
    for text in texts:
        calls = format.calls(text, tools)
        yield calls, call_ids(format, calls, first_index)
        first_index += len(calls)


def call_ids(format: ToolFormat, calls: Sequence[Call], first_index: int) -> list[str]:
    """Ids of calls: those that the policy wrote, if the chat template accepts them."""
    return [
        call.id if format.usable_id(call.id) else format.call_id(call.name or NAMELESS, index)
        for index, call in enumerate(calls, start=first_index)
    ]


def attach_calls(
    format: ToolFormat, tools: ToolParameters, messages: Sequence[tuple[str, str]]
) -> tuple[Turn, ...]:
    """Messages for a chat template: with the calls in the policy's messages, and in tool outputs
    the calls that they answer, in order."""
    texts = [content for role, content in messages if role == "assistant"]
    calls_by_message, converted = parse_calls(format, tools, texts), list[Turn]()
    unanswered: list[tuple[str, str]] = []
    for role, content in messages:
        if role == "assistant":
            calls, ids = next(calls_by_message)
            converted.append(_assistant_message(content, calls, ids))
            unanswered = [(i, call.name or NAMELESS) for i, call in zip(ids, calls, strict=True)]
        elif role == "tool" and unanswered:
            identity, name = unanswered.pop(0)
            answer = {"role": role, "content": content, "tool_call_id": identity, "name": name}
            converted.append(answer)
        else:
            converted.append({"role": role, "content": content})
    return tuple(converted)


def _assistant_message(content: str, calls: Sequence[Call], ids: Sequence[str]) -> Turn:
    """A turn of the policy; its calls, if any, replace its text."""
    if not calls:
        return {"role": "assistant", "content": content}
    tool_calls = [
        message_call(identity, call.name or NAMELESS, Arguments(call.arguments))
        for call, identity in zip(calls, ids, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}
