"""Add two numbers of two to five digits or more, thinking aloud, digit by digit from the right.

``47+385=`` may be answered by ``7+5+0=12,4+8+1=13,0+3+1=04#432``: digit, digit and carry, their sum
as carry and digit, and after the marker the result. The result alone is scored, so that whatever is
written before the marker is the policy's own chain of thought; its length grows with the operands.
"""

from random import Random

from jrl.tasks.definition import Record
from jrl.tasks.procedural import ProceduralTask, score_exact
from jrl.tasks.task import Verdict

MARKER = "#"
MIN_DIGITS, MAX_DIGITS = 2, 5
MAX_OPERAND_DIGITS = 64
TAIL = 1.5
"""Exponent of the lengths of long operands: of those that have MIN digits or more a share
``(MIN / n) ** TAIL`` has n or more."""


class Scratchpad:
    """Prompts of two numbers, answered by the steps and then the sum.

    Args:
      min_digits, max_digits: digits of the shortest and the longest operand.
      independent_lengths: whether operand lengths are independent and uniform; else both have one,
        with a heavy tail.
    """

    characters = "#+,0123456789="

    def __init__(
        self,
        min_digits: int = MIN_DIGITS,
        max_digits: int = MAX_DIGITS,
        independent_lengths: bool = True,
    ):
        self._min_digits, self._max_digits, self._independent_lengths = (
            min_digits,
            max_digits,
            independent_lengths,
        )
        steps = max_digits * len("9+9+1=19,") - 1
        self.max_prompt_length = 2 * max_digits + len("+=")
        self.max_response_length = steps + len(MARKER) + max_digits + 1

    def prompts(self, random: Random) -> Record:
        if self._independent_lengths:
            left, right = (
                _number(random, random.randrange(self._min_digits, self._max_digits + 1))
                for _ in range(2)
            )
        else:
            # A Pareto variable from the shortest on, rounded down.
            length = int(self._min_digits * (1 - random.random()) ** (-1 / TAIL))
            left, right = (_number(random, min(length, self._max_digits)) for _ in range(2))
        answer = f"{','.join(_steps(left, right))}{MARKER}{left + right}"
        return {"prompt": f"{left}+{right}=", "answer": answer}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        """Compares what follows the last marker with the sum; without one there is no answer."""
        _, marker, result = completion.rpartition(MARKER)
        return score_exact(result if marker else "", answer.rpartition(MARKER)[2], "0123456789")


def scratchpad_of(min_digits: int, max_digits: int, seed: int) -> ProceduralTask:
    """The task with operands of one length, `min_digits` to `max_digits` with a heavy tail.

    Raises:
      ValueError: for operands shorter than two digits or longer than `MAX_OPERAND_DIGITS`.
    """
    name = (
        f"scratchpad:{max_digits}"
        if min_digits == MIN_DIGITS
        else f"scratchpad:{min_digits}-{max_digits}"
    )
    if not MIN_DIGITS <= min_digits <= max_digits <= MAX_OPERAND_DIGITS:
        raise ValueError(
            f"task={name!r}: operands have {MIN_DIGITS} to {MAX_OPERAND_DIGITS} digits, "
            "the shortest no more than the longest."
        )
    return ProceduralTask(name, seed, Scratchpad(min_digits, max_digits, independent_lengths=False))


def _number(random: Random, num_digits: int) -> int:
    return random.randrange(10 ** (num_digits - 1), 10**num_digits)


def _steps(left: int, right: int) -> list[str]:
    steps, carry = [], 0
    while left or right:
        total = left % 10 + right % 10 + carry
        steps.append(f"{left % 10}+{right % 10}+{carry}={total:02d}")
        left, right, carry = left // 10, right // 10, total // 10
    return steps
