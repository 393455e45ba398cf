"""Tools, and an environment that lets a policy call them before it answers."""

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
"""Message to a turn that was cut at its maximum length before it called or answered."""
REPORTED_ERRORS = (ValueError, ArithmeticError, LookupError)
"""Exceptions of a tool that the policy is told: those that the values of a call can cause. Others
are faults of the tool, and end the conversation as one."""


@dataclass(frozen=True)
class Tool:
    """Something that a policy may call; `of` makes one of a function.

    Attributes:
      name: as it is called.
      description: for the policy to read.
      parameters: the JSON schema of its arguments, which calls are checked against.
      function: is given the arguments by their names, and may be ``async``. What it returns is the
        answer, as JSON where it is no text.
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
        """The tool that a function is, by its name, its types and its docstring.

        The first paragraph of the docstring is the description; its section ``Args:`` says what
        arguments are. Those with a default are optional.

        Args:
          name: in place of the function's.
          description: in place of what the docstring says.
          about: what an argument is, by its name, in place of what the docstring says.

        Raises:
          ValueError: for an argument without a type, or with one that is no JSON value's.
        """
        tool_name = name_of(function) if name is None else name
        summary = description_of(function) if description is None else description
        return cls(tool_name, summary, parameters_of(function, about or {}), function)

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates expect it."""
        parameters = json.loads(json.dumps(self.parameters))
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function and returns its result, a coroutine to await where it is ``async``.

        Raises:
          ValueError: for arguments that the schema does not allow, in one line.
        """
        return self.function(**check_arguments(self.name, arguments, self.parameters))


class ToolEnvironment:
    """Answers calls of tools; a turn without one is the final answer.

    The calls of a message are those that are read in the format of the checkpoint, and of a policy
    without a chat template those that can be found in any. A turn that was cut before it called
    anything is the final answer where it marks one, and is told that it was too long otherwise.

    Args:
      tools: that may be called.
      score: scores a final answer, which `jrl.tasks.answers` extracts from the turn.
      end: written after each answer, by which a policy without a template sees that it is whole.
      most: turns with calls; one more ends the conversation.
      error: stands for every error, for a policy that knows few characters; None says what it is.
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
        """The prompt has said it all."""

    def step(self, message: Mapping[str, Any]) -> Stepped | Awaitable[Stepped]:
        """The answers of all calls in their order, or the score of what is no call; to be awaited
        where a tool is ``async``."""
        text = message["content"]
        calls = (
            parse_message_calls(message)
            if "tool_calls" in message
            else detect_calls(text, self._tool_parameters)
        )
        if truncated := bool(message.get("truncated")):
            # The last of them may be the one that was cut.
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
        # One after the other: a call may count on what those before it have done.
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
