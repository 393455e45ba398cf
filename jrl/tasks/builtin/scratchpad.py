"""Add two numbers of two to five digits, thinking aloud, digit by digit from the right.

``47+385=`` may be answered by ``7+5+0=12,4+8+1=13,0+3+1=04#432``: digit, digit and carry, their sum
as carry and digit, and after the marker the result. The result alone is scored, so that whatever is
written before the marker is the policy's own chain of thought; its length grows with the operands.
"""

from random import Random

from jrl.tasks.procedural import ProceduralTask, exact
from jrl.tasks.task import Example, Verdict

MARKER = "#"
MIN_DIGITS, MAX_DIGITS = 2, 5


def scratchpad(seed: int) -> ProceduralTask:
    """Prompts of two numbers of two to five digits, answered by the steps and then the sum.

    Args:
      seed: picks the stream of prompts.
    """
    steps = MAX_DIGITS * len("9+9+1=19,") - 1
    return ProceduralTask(
        name="scratchpad",
        seed=seed,
        max_prompt_length=2 * MAX_DIGITS + len("+="),
        max_response_length=steps + len(MARKER) + MAX_DIGITS + 1,
        characters="#+,0123456789=",
        draw=_draw,
        score=_score,
    )


def _draw(random: Random) -> Example:
    left, right = _number(random), _number(random)
    return Example(f"{left}+{right}=", f"{','.join(_steps(left, right))}{MARKER}{left + right}")


def _number(random: Random) -> int:
    num_digits = random.randrange(MIN_DIGITS, MAX_DIGITS + 1)
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
