"""Tools, and an environment that lets a policy call them before it answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
      run: gives the answer of a call; a ValueError is an answer too.
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
        """What a call gives, an error in words where it fails."""
        try:
            return self.run(call.argument(self.argument))
        except ValueError as error:
            return f"error: {error}"


class ToolEnvironment:
    """Answers calls of tools; a turn without one is the final answer.

    Args:
      tools: that may be called.
      score: what a final answer is worth.
      end: written after each answer, by which a policy without a template sees that it is whole.
      most: turns with calls; one more ends the conversation.
    """

    def __init__(
        self, tools: Sequence[Tool], score: Callable[[str], float], *, end: str = "", most: int = 8
    ):
        self._tools = {tool.name: tool for tool in tools}
        self._score, self._end, self._left = score, end, most

    def reset(self) -> None:
        """The prompt has said it all."""

    def step(self, message: Mapping[str, str]) -> Stepped:
        """The answers of all calls, or the score of what is no call."""
        text = message["content"]
        calls = calls_in(text)
        if not calls:
            return [], self._score(text), True
        answers = [{"role": "tool", "content": self._answer(call) + self._end} for call in calls]
        self._left -= 1
        return answers, 0.0, self._left < 0

    def _answer(self, call: Call) -> str:
        if not call.name:
            return "error: the call cannot be read"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool is called {call.name[:40]}"
        return tool.answer(call)
