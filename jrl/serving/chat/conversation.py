"""Conversation with a service in this process: messages, streamed answers, and tools that run."""

import json
import queue
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jrl.serving.api.fields import ApiError
from jrl.serving.api.sampling import with_defaults
from jrl.serving.api_request import ApiRequest, parse_chat
from jrl.serving.policy import ApiModel
from jrl.serving.responses import ChoiceDelta, Event, Job
from jrl.serving.service import Service
from jrl.serving.turn_stream import ToolCall, TurnDelta
from jrl.tasks.tools.calls import message_call
from jrl.tasks.tools.tool import Tool, ToolEnvironment

MAX_ROUNDS = 8
"""Maximum number of turns with tool calls in an answer."""


@dataclass(frozen=True)
class ToolOutput:
    """Output of a tool that the policy called."""

    text: str


@dataclass
class Conversation:
    """Conversation of one user with a policy.

        conversation = Conversation(service, served)
        for part in conversation.answer("How many pens?"):
            print(part)

    Attributes:
      tools: run when the policy calls them.
      arguments: of each request, for example temperature and seed.
      system: text of the system message; empty is none.
      messages: of the user, the policy and the tools so far.
      reasoning: of the last answer.
    """

    service: Service
    served: ApiModel
    tools: Sequence[Tool] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""

    def answer(self, text: str) -> Generator[TurnDelta | ToolOutput, None, None]:
        """Streams the answer to a message, with the outputs of its tool calls.

        An answer that the caller ends early is kept as far as it came. One that fails is not, nor
        is the message.

        Raises:
          ApiError: for a message that the template or the length of the policy rejects.
        """
        num_before, self.reasoning = len(self.messages), ""
        environment = ToolEnvironment(self.tools, lambda _: 0.0, most=MAX_ROUNDS)
        self.messages.append({"role": "user", "content": text})
        try:
            ended = False
            while not ended:
                turn = yield from self._turn()
                stepped = environment.step(turn)
                assert isinstance(stepped, tuple), "a tool is async"
                replies, _, ended = stepped
                calls = turn["tool_calls"]
                self.messages += [
                    {**reply, "tool_call_id": call["id"]}
                    for call, reply in zip(calls, replies, strict=True)
                ]
                for reply in replies:
                    yield ToolOutput(reply["content"])
        except Exception:
            del self.messages[num_before:]
            raise
        finally:
            if self.messages:  # calls that the caller did not wait for have no output
                self.messages[-1].pop("tool_calls", None)

    def _turn(self) -> Generator[TurnDelta, None, dict[str, Any]]:
        """Streams one turn of the policy, appends its message and returns it."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[ToolCall] = []
        try:
            for delta in self._stream():
                message["content"] += delta.content
                self.reasoning += delta.reasoning
                calls += delta.calls
                yield delta
        finally:
            if calls:
                message["tool_calls"] = [
                    message_call(call.id, call.name, json.loads(call.arguments)) for call in calls
                ]
            self.messages.append(message)
        return {**message, "tool_calls": message.get("tool_calls", [])}

    def _stream(self) -> Iterator[TurnDelta]:
        """Submits the conversation, and yields what is generated; cancels it if it is ended."""
        request = self._request()
        (prompt,) = self.served.prompts(request)
        events = queue.SimpleQueue[Event]()
        limit = self.served.limit(request, prompt)
        job = Job(request, [prompt], [limit], events.put)
        self.service.submit(job)
        finish = None
        try:
            while finish is None:
                event = events.get()
                if isinstance(event, ApiError):
                    raise event
                if isinstance(event, ChoiceDelta):
                    finish = event.finish
                    yield event.turn
        finally:
            if finish is None:
                self.service.cancel(job)

    def _request(self) -> ApiRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: Mapping[str, Any] = {
            "model": self.served.name,
            "messages": [*system, *self.messages],
            "tools": [tool.schema for tool in self.tools],
            **self.arguments,
        }
        return parse_chat(with_defaults(body, self.served.defaults))
