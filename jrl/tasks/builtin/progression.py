"""Continue an arithmetic progression modulo 100: ``93,96,99=`` asks for ``02,05,08``."""

from random import Random

from jrl.tasks.procedural import ProceduralTask, exact
from jrl.tasks.task import Example, Verdict

MODULUS = 100
NUM_TERMS = 3


def progression(seed: int) -> ProceduralTask:
    """Prompts of three two-digit terms, answered by the next three.

    Args:
      seed: picks the stream of prompts.
    """
    return ProceduralTask(
        name="progression",
        seed=seed,
        max_prompt_length=len("00,00,00="),
        max_response_length=len("00,00,00"),
        characters=",0123456789=",
        draw=_draw,
        score=_score,
    )


def _draw(random: Random) -> Example:
    start, step = random.randrange(MODULUS), random.randrange(1, MODULUS)
    terms = [f"{(start + step * index) % MODULUS:02d}" for index in range(2 * NUM_TERMS)]
    return Example(",".join(terms[:NUM_TERMS]) + "=", ",".join(terms[NUM_TERMS:]))


def _score(example: Example, completion: str) -> Verdict:
    return exact(completion, example.answer, ",0123456789")
