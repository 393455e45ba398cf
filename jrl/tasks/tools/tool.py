"""Tools, and an environment in which a policy can call them before its answer."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jrl.tasks.answers import extract
from jrl.tasks.tools.calls import Call, parse_message_calls
from jrl.tasks.tools.detection import detect_calls
from jrl.tasks.tools.schema import check_arguments, description_of, name_of, parameters_of

Stepped = tuple[list[dict[str, str]], float, bool]

TRUNCATED_MESSAGE = (
    "the turn was cut off, it was too long: call a tool or give the answer in fewer words"
)
"""Reply to a turn that was cut at its maximum length before a call or an answer."""
REPORTED_ERRORS = (ValueError, ArithmeticError, LookupError)
"""Exceptions of a tool that are reported to the policy: those that the values of a call can cause.
Others are faults of the tool, and end the conversation."""


@dataclass(frozen=True)
class Tool:
    """A tool that a policy may call; `of` makes one from a function.

    Attributes:
      name: used in calls.
      description: text for the policy.
      parameters: JSON schema of its arguments; calls are validated against it.
      function: called with keyword arguments; may be ``async``. Its result is the answer, as JSON
        if it is not a text.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        about: Mapping[str, str] | None = None,
    ) -> "Tool":
        """Makes a tool from a function: its name, its types and its docstring.

        The first paragraph of the docstring is the description; its section ``Args:`` describes the
        arguments. Arguments with a default are optional.

        Args:
          name: replaces the function's name.
          description: replaces the first paragraph.
          about: descriptions of arguments by name, which replace the docstring's.

        Raises:
          ValueError: for an argument that has no type, or a type that JSON has no value of.
        """
        tool_name = name_of(function) if name is None else name
        summary = description_of(function) if description is None else description
        return cls(tool_name, summary, parameters_of(function, about or {}), function)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema in the form that chat templates expect."""
        parameters = json.loads(json.dumps(self.parameters))
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function and returns its result, a coroutine if it is ``async``.

        Raises:
          ValueError: for arguments that the schema does not allow, in one line.
        """
        return self.function(**check_arguments(self.name, arguments, self.parameters))


class ToolEnvironment:
    """Environment that answers tool calls; a turn that has no call is the final answer.

    The calls of a message are those parsed in the format of the checkpoint, or for a policy that
    has no chat template the calls found in any format. A turn that was cut before a call is the
    final answer if it marks one; otherwise the reply says that it was too long.

    Args:
      tools: that may be called.
      score: scores a final answer, which `jrl.tasks.answers` extracts from the turn.
      end: written after each tool output, to mark its end for a policy that has no chat template.
      most: maximum number of turns with calls; one more ends the conversation.
      error: replaces every error message, for a policy with few characters; None keeps the message.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        score: Callable[[str], float],
        *,
        end: str = "",
        most: int = 8,
        error: str | None = None,
    ):
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two tools are called {twice}: give one of them another name")
        self._tool_parameters = {tool.name: tool.parameters for tool in tools}
        self._score, self._end, self._left, self._error = score, end, most, error

    def reset(self) -> None:
        """Adds no message to the prompt."""

    def step(self, message: Mapping[str, Any]) -> Stepped | Awaitable[Stepped]:
        """Returns the outputs of all calls in order, or scores a final answer; a coroutine if a
        tool is ``async``."""
        text = message["content"]
        calls = (
            parse_message_calls(message)
            if "tool_calls" in message
            else detect_calls(text, self._tool_parameters)
        )
        if truncated := bool(message.get("truncated")):
            # The cut call may be the last one.
            calls = [call for call in calls if not call.error]
        if not calls:
            answer = extract(text, bare=self._error is not None)
            if truncated and (answer is None or not answer.marked):
                return self._reply("user", [self._error_text(TRUNCATED_MESSAGE)])
            return [], 0.0 if answer is None else self._score(answer.text), True
        answers: list[str] = []
        for index, call in enumerate(calls):
            answer = self._answer(call)
            if not isinstance(answer, str):
                return self._await_answers(answers, answer, calls[index + 1 :])
            answers.append(answer)
        return self._reply("tool", answers)

    async def _await_answers(
        self, answers: list[str], answer: Awaitable[str], after: Sequence[Call]
    ) -> Stepped:
        # Sequentially: a call may depend on the effects of earlier calls.
        answers.append(await answer)
        for call in after:
            reply = self._answer(call)
            answers.append(reply if isinstance(reply, str) else await reply)
        return self._reply("tool", answers)

    def _reply(self, role: str, contents: Sequence[str]) -> Stepped:
        self._left -= 1
        messages = [{"role": role, "content": content} for content in contents]
        return messages, 0.0, self._left < 0

    def _answer(self, call: Call) -> str | Awaitable[str]:
        try:
            result = self._find_tool(call).call(call.arguments)
        except REPORTED_ERRORS as error:
            return self._format_error(error)
        if inspect.isawaitable(result):
            return self._await_result(result)
        return _text(result) + self._end

    async def _await_result(self, result: Awaitable[Any]) -> str:
        try:
            return _text(await result) + self._end
        except REPORTED_ERRORS as error:
            return self._format_error(error)

    def _format_error(self, error: Exception) -> str:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return self._error_text(f"{kind}{error}")

    def _error_text(self, error: str) -> str:
        return (f"error: {error}" if self._error is None else self._error) + self._end

    def _find_tool(self, call: Call) -> Tool:
        if call.error:
            raise ValueError(call.error)
        if call.name not in self._tools:
            names = ", ".join(self._tools)
            raise ValueError(f"no tool is called {call.name[:40]}; there are: {names}")
        return self._tools[call.name]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
