"""Arithmetic task that needs a calculator tool.

The policy answers ``47*83-6=`` with a call, ``@calc 47*83-6``. The calculator returns ``3895.``,
and the second turn ``3895`` scores full marks. A policy that knows the result may answer without a
call.
"""

from random import Random

from jrl.tasks.builtin.expression import parse
from jrl.tasks.definition import Record
from jrl.tasks.tools.calculator import CALCULATOR, calculate
from jrl.tasks.tools.tool import ToolEnvironment

MAX_CALLS = 2
ERROR = "error"
"""Output of a call that fails."""


class Calculator:
    """A product of two numbers of two digits, and a third added or taken away."""

    max_prompt_length = len("99*99+99=")
    # The call, its answer and the result, with the ends of two turns.
    max_response_length = len("@calc 99*99+99") + 1 + len("9900.") + len("9900") + 1
    characters = "".join(sorted(set("0123456789*+-/=@calc ." + ERROR)))
    tools = (CALCULATOR.schema,)

    def prompts(self, random: Random) -> Record:
        """Draws the numbers, and a conversation that calls once."""
        first, second, third = (random.randrange(10, 100) for _ in range(3))
        text = f"{first}*{second}{random.choice('+-')}{third}"
        value = calculate(text)
        messages = [
            {"role": "assistant", "content": f"@{CALCULATOR.name} {text}"},
            {"role": "tool", "content": f"{value}."},
            {"role": "assistant", "content": value},
        ]
        return {"prompt": f"{text}=", "expression": text, "turns": messages}

    def environment(self, expression: str) -> ToolEnvironment:
        """Knows the result."""
        value = parse(expression).value()

        def score(text: str) -> float:
            return float(text.strip() == str(value))

        return ToolEnvironment([CALCULATOR], score, end=".", most=MAX_CALLS, error=ERROR)
