"""Turn of a chat's choice during generation: answer and reasoning are streamed, tool calls come at
the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jrl.serving.api_request import ApiRequest
from jrl.serving.transcript import Decode
from jrl.tasks.answers.reasoning import CHANNEL, HARMONY_TOKENS, REASONING_TOKENS, TurnReader
from jrl.tasks.tools.call_format import ToolFormat, to_json
from jrl.tasks.tools.calls import ToolParameters
from jrl.text.prompt_format import opened_turn
from jrl.text.tokenizer import Tokenizer
from jrl.text.tool_calls import call_ids


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a response, with its id in the conversation and its arguments as JSON."""

    id: str
    name: str
    arguments: str


class TurnDelta(NamedTuple):
    """Increment of a turn: its answer and its reasoning, and at the end its calls."""

    content: str
    reasoning: str
    calls: Sequence[ToolCall] = ()


class CallReader(NamedTuple):
    """Tool calls of a turn.

    Attributes:
      format: of the checkpoint.
      tools: that may be called.
      first_index: number of calls in the conversation so far, for the ids of these.
      parallel: true if there may be more than one call.
    """

    format: ToolFormat
    tools: ToolParameters
    first_index: int = 0
    parallel: bool = True

    def read(self, text: str) -> tuple[list[ToolCall], str]:
        """The calls in a text, and the text outside of them; no calls if one cannot be parsed."""
        calls, outside = self.format.find(text, self.tools)
        if not calls or any(call.error for call in calls):
            return [], text
        tool_calls = [
            ToolCall(identity, call.name, to_json(dict(call.arguments)))
            for call, identity in zip(
                calls, call_ids(self.format, calls, self.first_index), strict=True
            )
        ]
        return tool_calls if self.parallel else tool_calls[:1], outside


class TurnStream:
    """Separates the text of a choice into answer, reasoning and tool calls.

    Text from the mark of a call on is withheld until the choice has ended, as its calls are
    determined only then. What turns out to be no call is text.

    Args:
      before: the end of the prompt (`opened_turn`).
      calls: reader of its tool calls; None if it has none, or they stay text.
      reasons: false if a grammar makes all text the answer.
    """

    def __init__(self, before: str = "", calls: CallReader | None = None, reasons: bool = True):
        markers = None if calls is None else calls.format.opening_markers
        if markers == () and not reasons:
            markers = (CHANNEL,)
        self._reader, self._calls = TurnReader(before, markers, reasons), calls

    def add(self, text: str, last: bool) -> TurnDelta:
        """Appends text; `last` is true if no more comes."""
        parts, calls = self._reader.add(text), list[ToolCall]()
        if last:
            parts += self._reader.finish()
            if self._calls is not None and self._reader.is_holding:
                calls, outside = self._calls.read(self._reader.held)
                parts += self._reader.release(outside, has_calls=bool(calls)) if outside else []
        content, reasoning = (
            "".join(part.text for part in parts if part.kind == kind)
            for kind in ("content", "reasoning")
        )
        return TurnDelta(content, reasoning, calls)


def turn_stream(
    request: ApiRequest, tokenizer: Tokenizer, format: ToolFormat | None, prompt: Sequence[int]
) -> TurnStream | None:
    """Reader of a choice of a request; None if it is no chat.

    Args:
      format: of the checkpoint's tool calls; None if it is unknown.
    """
    if not request.chat:
        return None
    tools, calls = request.tools, None
    if tools is not None and tools.choice != "none" and format is not None:
        num_calls = sum(len(turn.get("tool_calls", ())) for turn in request.messages)
        calls = CallReader(format, tools.parameters, num_calls, tools.parallel)
    # A grammar begins with the answer, whatever the prompt has opened.
    before = "" if request.needs_grammar else opened_turn(tokenizer, prompt)
    return TurnStream(before, calls, reasons=request.rule is None)


def text_decoder(request: ApiRequest, tokenizer: Tokenizer) -> Decode:
    """Decoder of a request's tokens to text with the special tokens that it is to have: marks of
    reasoning in a chat, all in one with tools, and all of a request that does not skip them."""
    special = tokenizer.special_tokens
    calls = request.tools is not None and request.tools.choice != "none"
    written = set(special)
    if not calls and request.output.skips_special:
        markers = REASONING_TOKENS if request.chat else frozenset()
        written &= markers | HARMONY_TOKENS if CHANNEL in special and request.chat else markers
    if not written:
        return tokenizer.decode
    hidden = tokenizer.special_ids - {special[text] for text in written}
    return lambda ids: tokenizer.decode_special([each for each in ids if each not in hidden])
