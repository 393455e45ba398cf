"""Tools, and an environment that lets a policy call them before it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jrl.tasks.answers import extract
from jrl.tasks.tools.calls import Call, calls_in

Stepped = tuple[list[dict[str, str]], float, bool]


@dataclass(frozen=True)
class Tool:
    """Something that a policy may call.

    Attributes:
      name: as it is called.
      description: for the policy to read.
      argument: the name of its one argument, a text.
      about: what that is.
      run: gives the answer of a call; a ValueError becomes an answer too.
    """

    name: str
    description: str
    argument: str
    about: str
    run: Callable[[str], str]

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates expect it."""
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": "string", "description": self.about}},
            "required": [self.argument],
        }
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    def answer(self, call: Call) -> str:
        """What a call gives.

        Raises:
          ValueError: where it fails, saying why.
        """
        return self.run(call.argument(self.argument))


class ToolEnvironment:
    """Answers calls of tools; a turn without one is the final answer.

    Args:
      tools: that may be called.
      score: what a final answer is worth; it is given what `jrl.tasks.answers` finds in the turn.
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
        self._score, self._end, self._left, self._error = score, end, most, error

    def reset(self) -> None:
        """The prompt has said it all."""

    def step(self, message: Mapping[str, str]) -> Stepped:
        """The answers of all calls, or the score of what is no call."""
        text = message["content"]
        calls = calls_in(text)
        if not calls:
            answer = extract(text, bare=self._error is not None)
            return [], 0.0 if answer is None else self._score(answer.text), True
        answers = [{"role": "tool", "content": self._answer(call) + self._end} for call in calls]
        self._left -= 1
        return answers, 0.0, self._left < 0

    def _answer(self, call: Call) -> str:
        try:
            return self._tool(call).answer(call)
        except ValueError as error:
            return f"error: {error}" if self._error is None else self._error

    def _tool(self, call: Call) -> Tool:
        if not call.name:
            raise ValueError("the call cannot be read")
        if call.name not in self._tools:
            raise ValueError(f"no tool is called {call.name[:40]}")
        return self._tools[call.name]
