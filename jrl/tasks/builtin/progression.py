"""Continue an arithmetic progression modulo 100: ``93,96,99=`` asks for ``02,05,08``."""

from random import Random

from jrl.tasks.definition import Record
from jrl.tasks.procedural import score_exact
from jrl.tasks.task import Verdict

MODULUS = 100
NUM_TERMS = 3


class Progression:
    """Prompts of three two-digit terms, answered by the next three."""

    max_prompt_length = len("00,00,00=")
    max_response_length = len("00,00,00")
    characters = ",0123456789="

    def prompts(self, random: Random) -> Record:
        start, step = random.randrange(MODULUS), random.randrange(1, MODULUS)
        terms = [f"{(start + step * index) % MODULUS:02d}" for index in range(2 * NUM_TERMS)]
        return {"prompt": ",".join(terms[:NUM_TERMS]) + "=", "answer": ",".join(terms[NUM_TERMS:])}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        return score_exact(completion, answer, ",0123456789")
