"""Add two three-digit numbers, the sum written backwards: ``123+989=`` asks for ``2111``.

Backwards, because then each digit depends only on digits and a carry that lie to its left.
"""

from random import Random

from jrl.tasks.procedural import ProceduralTask, exact_digits
from jrl.tasks.task import Example


def addition(seed: int) -> ProceduralTask:
    """Prompts of two numbers from 100 to 999, answered by their sum, last digit first.

    Args:
      seed: picks the stream of prompts.
    """
    return ProceduralTask(
        name="addition",
        seed=seed,
        max_prompt_length=len("999+999="),
        max_response_length=len("8991"),
        characters="+0123456789=",
        draw=_draw,
        score=exact_digits,
    )


def _draw(random: Random) -> Example:
    left, right = random.randrange(100, 1000), random.randrange(100, 1000)
    return Example(f"{left}+{right}=", str(left + right)[::-1])
