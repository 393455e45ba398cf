"""Calls of gpt-oss: messages of the harmony format that are addressed to a function."""

import re
from collections.abc import Sequence

from jrl.tasks.tools.calls import Call, ToolParameters, unreadable_call
from jrl.tasks.tools.formats.format import ToolFormat
from jrl.tasks.tools.formats.json_text import make_call, to_json

MESSAGE = "<|message|>"
PEOPLE = ("assistant", "user", "system", "developer", "all")
"""To whom a message may go that calls nothing."""


class Harmony(ToolFormat):
    """Of gpt-oss, whose reasoning is a channel of its own, "analysis", in which nothing is called::

    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>
    """

    name = "harmony"
    template_markers = ("<|channel|>",)
    _bounds = re.compile(r"<\|(?:start|end|call|return)\|>")
    _channel = re.compile(r"<\|channel\|>\s*(\w+)")
    _recipient = re.compile(r"\bto=([^\s<]+)")

    def calls(self, text: str, tools: ToolParameters) -> list[Call]:
        calls = []
        for message in self._bounds.split(text):
            head, opened, body = message.partition(MESSAGE)
            channel, recipient = self._channel.search(head), self._recipient.search(head)
            if not opened or recipient is None or recipient[1] in PEOPLE:
                continue
            if channel is not None and channel[1] == "analysis":
                continue
            name, body = recipient[1].removeprefix("functions."), body.strip()
            if not body.startswith("{"):
                calls.append(unreadable_call("its arguments are no JSON object", name))
            else:
                calls.append(make_call(name, body))
        return calls

    def render(self, calls: Sequence[Call]) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
            f"{MESSAGE}{to_json(dict(call.arguments))}<|call|>"
            for call in calls
        )
