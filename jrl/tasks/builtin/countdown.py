"""Reach a target with three numbers: ``3,7,11=40:`` may be answered by ``3*11+7`` or by ``7+11*3``.

Any expression scores that has the requested value and uses each given number exactly once.
"""

from fractions import Fraction
from operator import add, mul, sub
from random import Random
from typing import Any

from jrl.tasks.builtin.expression import parse
from jrl.tasks.definition import Record
from jrl.tasks.task import CORRECT, UNPARSABLE, WRONG, Verdict

MAX_NUMBER = 12
MAX_TARGET = 99

# How tightly each operation binds.
_RANK = {"+": 0, "-": 0, "*": 1, "/": 1}


class Countdown:
    """Prompts of three numbers from 1 to 12 in ascending order and a target from 1 to 99."""

    max_prompt_length = len("10,11,12=99:")
    max_response_length = len("12*(10+11)")
    characters = "()*+,-/0123456789:="

    def prompts(self, random: Random) -> Record:
        """Draws an expression first, and asks for its value, so that there always is an answer."""
        while True:
            numbers = [random.randrange(1, MAX_NUMBER + 1) for _ in range(3)]
            first, second = random.choice("+-*/"), random.choice("+-*/")
            pair = _join(str(numbers[0]), numbers[0], first, str(numbers[1]), numbers[1])
            if pair is None:
                continue
            text, value, rank = pair
            if random.randrange(2):
                inner = text if rank >= _RANK[second] else f"({text})"
                expression = _join(inner, value, second, str(numbers[2]), numbers[2])
            else:
                # On the right, equal rank needs parentheses as well: a-(b+c), a/(b*c).
                inner = text if rank > _RANK[second] else f"({text})"
                expression = _join(str(numbers[2]), numbers[2], second, inner, value)
            if expression is not None and 1 <= expression[1] <= MAX_TARGET:
                operands = ",".join(map(str, sorted(numbers)))
                return {"prompt": f"{operands}={expression[1]}:", "answer": expression[0]}

    def reward(self, prompt: str, completion: str, **record: Any) -> Verdict:
        operands, _, target = prompt.removesuffix(":").partition("=")
        try:
            expression = parse(completion)
        except ValueError:
            return UNPARSABLE
        if sorted(expression.numbers) != sorted(map(int, operands.split(","))):
            return WRONG
        try:
            return CORRECT if expression.value() == Fraction(target) else WRONG
        except ZeroDivisionError:
            return WRONG


def _join(
    left_text: str, left: int, operation: str, right_text: str, right: int
) -> tuple[str, int, int] | None:
    """Text, value and rank of two joined parts, or None where a division leaves a remainder."""
    if operation == "/":
        if right == 0 or left % right:
            return None
        value = left // right
    else:
        value = {"+": add, "-": sub, "*": mul}[operation](left, right)
    return f"{left_text}{operation}{right_text}", value, _RANK[operation]
