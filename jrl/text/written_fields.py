"""Fields of messages that a chat template writes: calls, reasoning, and the messages of each role.

A template passes over a field that it does not support. Each kind of field is rendered once with a
probe, a word that must occur in the text.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jrl.tasks.data.conversations import Conversation, Turn, content_of
from jrl.tasks.data.fields import short
from jrl.tasks.tools.calls import Arguments
from jrl.text.chat import ChatTemplate, TemplateRejection

CALLS = ("tool_calls", "function_call")
"""Fields of an assistant's message with calls."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message with its reasoning."""
REASONING_ITEMS = ("reasoning_details", "thinking_blocks")
"""Fields with the reasoning as a list of items, mostly beside the text."""
PROBE, PROBE_VALUE = "probe_of_a_field", "probe_of_a_value"
"""Words that replace the text, or the name and an argument of a call."""
ASKED, ANSWERED = {"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}


class WrittenFields:
    """The fields that a template writes, each rendered at most once."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._written: dict[tuple[Any, ...], bool] = {}

    def check(self, conversation: Conversation, trained: Collection[int]) -> None:
        """Rejects a conversation with calls, messages of a role, or reasoning in the messages that
        are trained on, by index, which the template does not write.

        Raises:
          ValueError: naming the field, with the remedy.
        """
        for index, turn in enumerate(conversation.turns):
            role = turn["role"]
            if role not in ("user", "assistant") and turn["content"]:
                begins = index == 0
                if not self._is_written(_role_probe(role, begins), conversation, role, begins):
                    raise ValueError(
                        f"the chat template does not write messages of role {role!r}, so that the "
                        "policy would never see them: give --chat-template a file that does, or "
                        "leave them out"
                    )
            for name in CALLS:
                if turn.get(name):
                    self._check_calls(turn, name, conversation, is_trained=index in trained)
            if index in trained:
                self._check_reasoning(turn, conversation)

    def _check_reasoning(self, turn: Turn, conversation: Conversation) -> None:
        """Some data sets have the same reasoning in two fields, of which one is enough."""
        texts = reasoning_of(turn)
        for text in set(texts.values()):
            names = [name for name in texts if texts[name] == text]
            if not any(self._writes_field({**ANSWERED, n: PROBE}, n, conversation) for n in names):
                raise _unwritten(names[0])

    def _check_calls(
        self, turn: Turn, name: str, conversation: Conversation, *, is_trained: bool
    ) -> None:
        """Some templates write only the first of multiple calls, or no content beside calls."""
        calls = turn[name]
        probe = (
            [_call_probe(call) for call in calls] if isinstance(calls, list) else _call_probe(calls)
        )
        probes: list[tuple[str, Any, str | None]] = []
        if isinstance(probe, list):
            probes += [(name, probe[:1], None), (f"a second entry of {name}", probe[:2], None)]
        else:
            probes.append((name, probe, None))
        if is_trained and content_of(turn).strip():
            probes.append((f"a content beside {name}", probes[0][1], PROBE))
        for field, value, content in probes:
            message = {**ANSWERED, "content": content, name: value}
            if not self._writes_field(message, name, conversation):
                raise _unwritten(field)

    def _writes_field(self, message: Turn, name: str, conversation: Conversation) -> bool:
        return self._is_written((ASKED, message), conversation, name, json.dumps(message))

    def _is_written(
        self, messages: tuple[Turn, ...], conversation: Conversation, *key: Any
    ) -> bool:
        """True if the template writes the probes in these messages, or rejects them, which shows
        nothing."""
        key = (*key, json.dumps(conversation.arguments, default=str), conversation.tools is None)
        if key not in self._written:
            probe = replace(conversation, turns=messages)
            try:
                text = self._template.write(probe)
            except TemplateRejection:
                self._written[key] = True
            else:
                asked, words = json.dumps(messages), (PROBE, PROBE_VALUE)
                self._written[key] = all(text.count(word) >= asked.count(word) for word in words)
        return self._written[key]


def _unwritten(name: str) -> ValueError:
    return ValueError(
        f"the chat template does not write {name}, so that the policy would neither see nor learn "
        "it: give --chat-template a file that does, or leave the field out"
    )


def has_calls(turn: Turn) -> bool:
    """True if a message has calls."""
    return any(map(turn.get, CALLS))


def reasoning_of(turn: Turn) -> dict[str, str]:
    """The fields of a message that are its reasoning, by name.

    Raises:
      ValueError: for reasoning that is not a text.
    """
    stated = {name: turn[name] for name in REASONING if turn.get(name)}
    items = {name: turn[name] for name in REASONING_ITEMS if turn.get(name)}
    for name, value in (stated or items).items():
        if not isinstance(value, str):
            raise ValueError(
                f"{name} is {short(value)}, and is not read: write the reasoning as a text in "
                '"reasoning_content", or leave the field out'
            )
    return {name: text for name, text in stated.items() if text.strip()}


def _call_probe(call: Any) -> Any:
    """A call of this form, with probes as its name and its argument."""
    if not isinstance(call, Mapping):
        return PROBE
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call_probe(function)}
    return {**call, "name": PROBE, "arguments": Arguments({"value": PROBE_VALUE})}


def _role_probe(role: str, begins: bool) -> tuple[Turn, ...]:
    """A conversation with a message of this role, at its beginning or later."""
    probe = {"role": role, "content": PROBE}
    if begins:
        return probe, ASKED
    if role in ("system", "developer"):
        return ASKED, ANSWERED, probe, ASKED
    identity = "call00000"
    function = {"name": "get", "arguments": Arguments({})}
    calling = {"id": identity, "type": "function", "function": function}
    call = {"role": "assistant", "content": None, "tool_calls": [calling]}
    return ASKED, call, {**probe, "name": "get", "tool_call_id": identity}
