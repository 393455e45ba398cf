"""Responses of ``/v1/responses``: items of reasoning, message and function calls, and the events of
their stream.

https://platform.openai.com/docs/api-reference/responses
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import numpy as np

from jrl.serving.api.fields import ApiError
from jrl.serving.api_request import ApiRequest
from jrl.serving.responses import ChoiceDelta, PromptDelta, ResponseBuilder, event
from jrl.serving.transcript import TokenStrings
from jrl.serving.turn_stream import ToolCall

IDS = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
"""Prefix of an item's id by its type."""
PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Type of the only part of an item by the item's type."""
Status = Literal["in_progress", "completed", "incomplete"]


@dataclass
class Item:
    """Item of a response: the text of its only part, or a call.

    Attributes:
      index: its position in the output.
    """

    kind: Literal["reasoning", "message", "function_call"]
    index: int
    text: str = ""
    call: ToolCall | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    status: Status = "in_progress"

    @property
    def part(self) -> dict[str, Any]:
        """Its only part."""
        more = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": PARTS[self.kind], "text": self.text, **more}

    @property
    def location(self) -> dict[str, Any]:
        """Members of an event that name it."""
        return {"item_id": f"{IDS[self.kind]}_{self.id}", "output_index": self.index}

    def entry(self, begins: bool = False) -> dict[str, Any]:
        """The item as it is in an output, or at its beginning."""
        item = {"id": self.location["item_id"], "type": self.kind, "status": self.status}
        if self.call is not None:
            arguments = "" if begins else self.call.arguments
            return {**item, "call_id": self.call.id, "name": self.call.name, "arguments": arguments}
        more = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {**item, **more, "content": [] if begins else [self.part]}


class ItemsBuilder(ResponseBuilder):
    """Response of items to one request, built up incrementally; arguments as of its base."""

    def __init__(
        self,
        request: ApiRequest,
        token_strings: TokenStrings,
        prompts: Sequence[np.ndarray],
        echoes: Sequence[str] = (),
    ):
        super().__init__(request, token_strings, prompts, echoes)
        self._id = f"resp_{secrets.token_hex(12)}"
        self._items: list[Item] = []
        self._events, self._numbers, self._num_reasoning = "", count(), 0

    def append(self, delta: ChoiceDelta | PromptDelta) -> None:
        assert isinstance(delta, ChoiceDelta), "no prompt is scored"
        if not self._started[0]:
            self._started[0] = True
            for kind in ("created", "in_progress"):
                self._emit(f"response.{kind}", response=self._response("in_progress"))
        num_before, turn = self._tokens[0], delta.turn
        super().append(delta)
        if turn.reasoning:
            self._num_reasoning += delta.num_tokens - num_before
            if self._request.shows_reasoning:
                self._write("reasoning", turn.reasoning)
        if turn.content:
            self._write("message", turn.content)
        if delta.finish is None:
            return
        if not (self._items or turn.calls):
            self._begin(Item("message", 0))
        self._end_last("incomplete" if delta.finish == "length" else "completed")
        for call in turn.calls:
            item = Item("function_call", len(self._items), call=call)
            self._begin(item)
            for end, name in (("delta", "delta"), ("done", "arguments")):
                kind = f"response.function_call_arguments.{end}"
                self._emit(kind, **item.location, **{name: call.arguments})
            self._end_last("completed")

    def _write(self, kind: Literal["reasoning", "message"], text: str) -> None:
        """Appends text to the last item, or to a new one if that is of another type."""
        if not self._items or self._items[-1].kind != kind:
            self._end_last("completed")
            self._begin(Item(kind, len(self._items)))
        item = self._items[-1]
        item.text += text
        self._emit_text(item, "delta", delta=text)

    def _begin(self, item: Item) -> None:
        self._items.append(item)
        added = item.entry(begins=True)
        self._emit("response.output_item.added", output_index=item.index, item=added)
        if item.call is None:
            location = {**item.location, "content_index": 0}
            self._emit("response.content_part.added", **location, part=item.part)

    def _end_last(self, status: Status) -> None:
        """Ends the last item, if there is one that has not ended."""
        item = self._items[-1] if self._items else None
        if item is None or item.status != "in_progress":
            return
        item.status = status
        if item.call is None:
            self._emit_text(item, "done", text=item.text)
            location = {**item.location, "content_index": 0}
            self._emit("response.content_part.done", **location, part=item.part)
        self._emit("response.output_item.done", output_index=item.index, item=item.entry())

    def _emit_text(self, item: Item, end: str, **text: str) -> None:
        more = {"logprobs": []} if item.kind == "message" else {}
        kind = f"response.{PARTS[item.kind]}.{end}"
        self._emit(kind, **item.location, content_index=0, **text, **more)

    def _emit(self, kind: str, **content: Any) -> None:
        """Adds an event, if the response is a stream."""
        if self._request.stream:
            numbered = {"type": kind, "sequence_number": next(self._numbers), **content}
            self._events += f"event: {kind}\n{event(numbered)}"

    def _response(self, status: str) -> dict[str, Any]:
        assert self._request.repeated is not None
        ended = status != "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head("response"),
            **self._request.repeated,
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "output": [item.entry() for item in self._items],
            "usage": self._usage() if ended else None,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def body(self) -> dict[str, Any]:
        return self._response("incomplete" if self._finishes[0] == "length" else "completed")

    def chunks(self, delta: ChoiceDelta | PromptDelta) -> str:
        events, self._events = self._events, ""
        return events

    def error(self, error: ApiError) -> str:
        content = {"code": error.code, "message": error.message, "param": error.param}
        self._emit("error", **content)
        return self._events

    def end(self) -> str:
        body = self.body()
        self._emit(f"response.{body['status']}", response=body)
        return self._events
