"""Add two numbers of two to five digits or more, thinking aloud, digit by digit from the right.

``47+385=`` may be answered by ``7+5+0=12,4+8+1=13,0+3+1=04#432``: digit, digit and carry, their sum
as carry and digit, and after the marker the result. The result alone is scored, so that whatever is
written before the marker is the policy's own chain of thought; its length grows with the operands.
"""

from functools import partial
from random import Random

from jrl.tasks.procedural import ProceduralTask, exact
from jrl.tasks.task import Example, Verdict

MARKER = "#"
MIN_DIGITS, MAX_DIGITS = 2, 5
MOST_DIGITS = 64
TAIL = 1.5
"""Exponent of the lengths of long operands: of those that have MIN digits or more a share
``(MIN / n) ** TAIL`` has n or more."""


def scratchpad(seed: int, digits: tuple[int, int] | None = None) -> ProceduralTask:
    """Prompts of two numbers, answered by the steps and then the sum.

    Args:
      seed: picks the stream of prompts.
      digits: the shortest and the longest operand; the lengths of both are then one, with a heavy
        tail. None draws each of two to five digits, all lengths alike.

    Raises:
      ValueError: for operands shorter than two digits or longer than `MOST_DIGITS`.
    """
    least, most = (MIN_DIGITS, MAX_DIGITS) if digits is None else digits
    span = f"{most}" if least == MIN_DIGITS else f"{least}-{most}"
    name = "scratchpad" if digits is None else f"scratchpad:{span}"
    if not MIN_DIGITS <= least <= most <= MOST_DIGITS:
        raise ValueError(
            f"task={name!r}: operands have {MIN_DIGITS} to {MOST_DIGITS} digits, "
            "the shortest no more than the longest."
        )
    steps = most * len("9+9+1=19,") - 1
    return ProceduralTask(
        name=name,
        seed=seed,
        max_prompt_length=2 * most + len("+="),
        max_response_length=steps + len(MARKER) + most + 1,
        characters="#+,0123456789=",
        draw=_draw if digits is None else partial(_draw_long, least, most),
        score=_score,
    )


def _draw(random: Random) -> Example:
    lengths = MIN_DIGITS, MAX_DIGITS + 1
    return _example(*(_number(random, random.randrange(*lengths)) for _ in range(2)))


def _draw_long(least: int, most: int, random: Random) -> Example:
    # A Pareto variable from the shortest on, rounded down.
    length = int(least * (1 - random.random()) ** (-1 / TAIL))
    return _example(*(_number(random, min(length, most)) for _ in range(2)))


def _example(left: int, right: int) -> Example:
    return Example(f"{left}+{right}=", f"{','.join(_steps(left, right))}{MARKER}{left + right}")


def _number(random: Random, num_digits: int) -> int:
    return random.randrange(10 ** (num_digits - 1), 10**num_digits)


def _steps(left: int, right: int) -> list[str]:
    steps, carry = [], 0
    while left or right:
        total = left % 10 + right % 10 + carry
        steps.append(f"{left % 10}+{right % 10}+{carry}={total:02d}")
        left, right, carry = left // 10, right // 10, total // 10
    return steps


def _score(example: Example, completion: str) -> Verdict:
    """Compares what follows the last marker with the sum; without a marker there is no answer."""
    _, marker, result = completion.rpartition(MARKER)
    answer = example.answer.rpartition(MARKER)[2]
    return exact(result if marker else "", answer, "0123456789")
