"""Tool calls of a choice during generation: text before them is streamed, calls come at the end."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jrl.serving.transcript import partial_match
from jrl.tasks.tools.call_format import ToolFormat, to_json
from jrl.tasks.tools.calls import Call, ToolParameters
from jrl.text.prompt_format import special_text_of
from jrl.text.tokenizer import Tokenizer
from jrl.text.tool_calls import parse_calls

OPENING = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|```\w*|.", re.DOTALL)
"""The mark at the beginning of a call: a tag, or a bracket of JSON or Python."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a response, with its id in the conversation and its arguments as JSON."""

    id: str
    name: str
    arguments: str


class CallStream:
    """Separates the text of a choice from its tool calls, in the format of the checkpoint.

    Text is final up to the possible start of a call; the rest is withheld until the choice has
    ended, as its calls are determined only then.

    Args:
      tools: that may be called.
      first_index: number of calls in the conversation so far, for the ids of these.
      parallel: true if there may be more than one call.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: ToolFormat,
        tools: ToolParameters,
        first_index: int = 0,
        parallel: bool = True,
    ):
        self._tokenizer, self._format, self._tools = tokenizer, format, tools
        self._first_index, self._parallel = first_index, parallel
        self._mark = opening_mark(format)
        special = tokenizer.special_tokens
        markers = {self._mark, *format.template_markers}
        self._mark_ids = frozenset(special[mark] for mark in markers if mark in special)
        self._ids: list[int] = []
        self._text, self._emitted = "", 0
        self._begin: int | None = None  # number of characters before the first call

    def add(self, tokens: Sequence[int], text: str, last: bool) -> tuple[str, list[ToolCall]]:
        """Appends tokens and the text that they complete; `last` is true if no more come.

        Returns:
          The text that is final, and at the end the calls.
        """
        num_before = len(self._ids)
        self._ids += tokens
        self._text += text
        if self._begin is None:
            self._begin = self._find_begin(num_before)
        calls = self._calls() if last else []
        if last and not calls:
            return self._emit(len(self._text)), []
        end = self._begin
        if end is None:
            end = len(self._text) - partial_match(self._text, self._mark)
        # Blanks before a call are not part of the text.
        return self._emit(len(self._text[:end].rstrip())), calls

    def _emit(self, end: int) -> str:
        text = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return text

    def _find_begin(self, num_before: int) -> int | None:
        """Number of characters before the first mark of a call; None if there is none yet."""
        for index, token in enumerate(self._ids[num_before:], start=num_before):
            if token in self._mark_ids:
                return min(len(self._tokenizer.decode(self._ids[:index])), len(self._text))
        position = self._text.find(self._mark, self._emitted)
        while position >= 0 and not self._may_open(position):
            position = self._text.find(self._mark, position + 1)
        return position if position >= 0 else None

    def _may_open(self, position: int) -> bool:
        # A bracket opens a call only at the beginning of a line.
        is_bracket = len(self._mark) == 1
        line = self._text[self._text.rfind("\n", 0, position) + 1 : position]
        return not is_bracket or not line.strip()

    def _calls(self) -> list[ToolCall]:
        """Calls of the whole choice; empty if one of them cannot be parsed."""
        text = special_text_of(self._tokenizer, np.array(self._ids, np.int32))
        ((calls, ids),) = parse_calls(self._format, self._tools, [text], self._first_index)
        if any(call.error for call in calls):
            return []
        tool_calls = [
            ToolCall(identity, call.name, to_json(dict(call.arguments)))
            for call, identity in zip(calls, ids, strict=True)
        ]
        return tool_calls if self._parallel else tool_calls[:1]


def opening_mark(format: ToolFormat) -> str:
    """The mark with which calls of a format begin."""
    match = OPENING.match(format.render([Call("a", {})]))
    assert match is not None, format.name
    return match[0]
