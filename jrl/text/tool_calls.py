"""Tool calls in a conversation: the format of a chat template, and messages with their calls.

The formats and their parsers are in `jrl.tasks.tools.formats`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jrl.tasks.data.arguments import Arguments
from jrl.tasks.data.conversations import Conversation, Turn
from jrl.tasks.tools.calls import Call, ToolParameters
from jrl.tasks.tools.formats.detection import FORMATS, detect_formats
from jrl.tasks.tools.formats.format import ToolFormat
from jrl.tasks.tools.tool import Tool
from jrl.text.chat import ChatTemplate
from jrl.text.tokenizer import Tokenizer


def _forecast(city: str, days: int) -> str:
    """Gives the weather of the next days."""
    return f"{city}, {days}"


PROBE = Tool.of(_forecast, name="get_forecast")
"""A tool that is called once to see how a template writes calls."""
ARGUMENTS = {"city": "Lima", "days": 3}
NAMELESS = "unknown"
"""The name of a call that has none, for templates."""


def tool_format_of(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format in which a checkpoint with this template calls tools; None where it is not known.

    It is the one that reads the call that the template writes; of a template that writes none, the
    one whose marks are in its source.
    """
    source = tokenizer.usage.chat_template
    marked = detect_formats("" if source is None else source)
    schema, known = PROBE.schema, {PROBE.name: PROBE.parameters}
    asked = replace(Conversation.from_pairs([("user", "?")]), tools=[schema])
    for format in (*marked, *(each for each in FORMATS if each not in marked)):
        call = Call(PROBE.name, ARGUMENTS)
        turn = _turn("", [call], [format.call_id(call.name, 0)])
        try:
            before = template.write(asked)
            whole = template.write(replace(asked, turns=(*asked.turns, turn)))
        except ValueError:
            return None
        text = _behind(before, whole)
        for end, identity in tokenizer.special_tokens.items():
            if identity in tokenizer.stop_ids:
                text = text.partition(end)[0]
        if PROBE.name not in text:
            return marked[0] if marked else None
        found = format.calls(text, known)
        if [(each.name, each.arguments) for each in found] == [(call.name, ARGUMENTS)]:
            return format
    return None


def _behind(before: str, whole: str) -> str:
    """Rest of `whole` from the first character that differs from `before`."""
    pairs = enumerate(zip(before, whole, strict=False))
    return whole[next((at for at, (a, b) in pairs if a != b), min(len(before), len(whole))) :]


def shows_tools(template: ChatTemplate, tools: list[Any], names: Sequence[str]) -> bool:
    """True if a template writes tools: its text differs with them, and has the name of each."""
    asked = Conversation.from_pairs([("user", "?")])
    given = template.render(replace(asked, tools=tools))
    return given != template.render(asked) and all(name in given for name in names)


def calls_of(
    format: ToolFormat, known: ToolParameters, texts: Sequence[str]
) -> Iterator[tuple[list[Call], list[str]]]:
    """The calls of each turn of a policy, and their ids: those that it wrote, where a chat template
    takes them."""
    number = 0
    for text in texts:
        calls = format.calls(text, known)
        ids = [
            call.id if format.usable_id(call.id) else format.call_id(call.name or NAMELESS, place)
            for place, call in enumerate(calls, start=number)
        ]
        number += len(calls)
        yield calls, ids


def with_calls(
    format: ToolFormat, known: ToolParameters, messages: Sequence[tuple[str, str]]
) -> tuple[Turn, ...]:
    """The messages as a chat template takes them: with the calls of the policy's, and in the
    answers of tools the calls that they answer, in order."""
    texts = [content for role, content in messages if role == "assistant"]
    calls_of_turns, turns = calls_of(format, known, texts), list[Turn]()
    waiting: list[tuple[str, str]] = []
    for role, content in messages:
        if role == "assistant":
            calls, ids = next(calls_of_turns)
            turns.append(_turn(content, calls, ids))
            waiting = [(i, call.name or NAMELESS) for i, call in zip(ids, calls, strict=True)]
        elif role == "tool" and waiting:
            identity, name = waiting.pop(0)
            answer = {"role": role, "content": content, "tool_call_id": identity, "name": name}
            turns.append(answer)
        else:
            turns.append({"role": role, "content": content})
    return tuple(turns)


def _turn(content: str, calls: Sequence[Call], ids: Sequence[str]) -> Turn:
    """A turn of the policy; where it calls, the calls stand in place of its text."""
    if not calls:
        return {"role": "assistant", "content": content}
    asked = [
        {
            "id": identity,
            "type": "function",
            "function": {"name": call.name or NAMELESS, "arguments": Arguments(call.arguments)},
        }
        for call, identity in zip(calls, ids, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": asked}
