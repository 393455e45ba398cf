"""Add two numbers of two to five digits or more, thinking aloud, digit by digit from the right.

``47+385=`` may be answered by ``7+5+0=12,4+8+1=13,0+3+1=04#432``: digit, digit and carry, their sum
as carry and digit, and after the marker the result. The result alone is scored, so that whatever is
written before the marker is the policy's own chain of thought; its length grows with the operands.
"""

from random import Random

from jrl.tasks.definition import Record
from jrl.tasks.procedural import ProceduralTask, exact
from jrl.tasks.task import Verdict

MARKER = "#"
MIN_DIGITS, MAX_DIGITS = 2, 5
MOST_DIGITS = 64
TAIL = 1.5
"""Exponent of the lengths of long operands: of those that have MIN digits or more a share
``(MIN / n) ** TAIL`` has n or more."""


class Scratchpad:
    """Prompts of two numbers, answered by the steps and then the sum.

    Args:
      least, most: digits of the shortest and the longest operand.
      alike: whether each operand has a length of its own, all equally likely; else both have one,
        with a heavy tail.
    """

    characters = "#+,0123456789="

    def __init__(self, least: int = MIN_DIGITS, most: int = MAX_DIGITS, alike: bool = True):
        self._least, self._most, self._alike = least, most, alike
        steps = most * len("9+9+1=19,") - 1
        self.max_prompt_length = 2 * most + len("+=")
        self.max_response_length = steps + len(MARKER) + most + 1

    def prompts(self, random: Random) -> Record:
        if self._alike:
            lengths = self._least, self._most + 1
            left, right = (_number(random, random.randrange(*lengths)) for _ in range(2))
        else:
            # A Pareto variable from the shortest on, rounded down.
            length = int(self._least * (1 - random.random()) ** (-1 / TAIL))
            left, right = (_number(random, min(length, self._most)) for _ in range(2))
        answer = f"{','.join(_steps(left, right))}{MARKER}{left + right}"
        return {"prompt": f"{left}+{right}=", "answer": answer}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        """Compares what follows the last marker with the sum; without one there is no answer."""
        _, marker, result = completion.rpartition(MARKER)
        return exact(result if marker else "", answer.rpartition(MARKER)[2], "0123456789")


def scratchpad_of(least: int, most: int, seed: int) -> ProceduralTask:
    """The task with operands of one length, from `least` to `most` digits with a heavy tail.

    Raises:
      ValueError: for operands shorter than two digits or longer than `MOST_DIGITS`.
    """
    name = f"scratchpad:{most}" if least == MIN_DIGITS else f"scratchpad:{least}-{most}"
    if not MIN_DIGITS <= least <= most <= MOST_DIGITS:
        raise ValueError(
            f"task={name!r}: operands have {MIN_DIGITS} to {MOST_DIGITS} digits, "
            "the shortest no more than the longest."
        )
    return ProceduralTask(name, seed, Scratchpad(least, most, alike=False))


def _number(random: Random, num_digits: int) -> int:
    return random.randrange(10 ** (num_digits - 1), 10**num_digits)


def _steps(left: int, right: int) -> list[str]:
    steps, carry = [], 0
    while left or right:
        total = left % 10 + right % 10 + carry
        steps.append(f"{left % 10}+{right % 10}+{carry}={total:02d}")
        left, right, carry = left // 10, right // 10, total // 10
    return steps
