"""Sort eight digits: ``31415926=`` asks for ``11234569``."""

from random import Random

from jrl.tasks.procedural import ProceduralTask, exact_digits
from jrl.tasks.task import Example

NUM_DIGITS = 8


def sort(seed: int) -> ProceduralTask:
    """Prompts of eight random digits, answered by the same digits in ascending order.

    Args:
      seed: picks the stream of prompts.
    """
    return ProceduralTask(
        name="sort",
        seed=seed,
        max_prompt_length=NUM_DIGITS + 1,
        max_response_length=NUM_DIGITS,
        characters="0123456789=",
        draw=_draw,
        score=exact_digits,
    )


def _draw(random: Random) -> Example:
    digits = [str(random.randrange(10)) for _ in range(NUM_DIGITS)]
    return Example("".join(digits) + "=", "".join(sorted(digits)))
